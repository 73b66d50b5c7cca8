"""What several tests share: ranks as threads, small models, servers, peers to compare with."""
