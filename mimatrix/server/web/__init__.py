"""HTTP beside the routes: limits, static files, TLS, addresses, documentation of the interface."""
