"""How things look: on a terminal and on a page."""
