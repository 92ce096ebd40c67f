"""Every placement and every norm of the tables on a page of its own."""
