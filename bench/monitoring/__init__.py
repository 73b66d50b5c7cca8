"""What monitoring costs, how soon it names who is slow or missing, and whether it cries wolf."""
