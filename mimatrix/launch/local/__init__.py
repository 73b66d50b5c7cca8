"""Teams on this machine, each under a supervisor that outlives the server."""
