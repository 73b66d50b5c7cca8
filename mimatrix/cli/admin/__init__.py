"""Commands of the server and its administrator."""
