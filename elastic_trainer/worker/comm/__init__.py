"""Process groups of one round, small collectives on them, and waits that the end of a round interrupts."""
