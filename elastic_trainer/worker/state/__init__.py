"""The training state of one rank: collected, saved, restored from storage, healed from a peer's memory."""
