"""Web layer of the server: middleware, static files, TLS and addresses; the REST interface is in `routes`."""
