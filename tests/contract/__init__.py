"""One suite for every implementation of the store port."""
