"""What is to be made of figures that ranks report: who is slow, who does not come, what is kept. Pure."""
