"""Plans at run time: measuring for them, agreeing on them, following them."""
