"""What processes say to one another: typed messages as JSON, and a client. Tensors are in none of them."""
