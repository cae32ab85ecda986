"""The making of a release: news of changes, checks of a tag, licences, sizes, and a smoke test of the wheel."""
