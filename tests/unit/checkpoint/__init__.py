"""Names, codec, manifest, commit, retention, sweeping and the manager, each by itself."""
