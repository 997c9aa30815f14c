"""What every service tells about itself: phases, metrics, the journal, and the HTTP endpoint that shows them."""
