"""FlexFlow's simulator of 2018 with its bugs repaired, and a faster search on it.

Exists so that searches can be compared exactly: equal model, equal cost, equal budget. How it
works and what it finds is in docs/design/flexflow2018.md. `search.plan` is the way in.
"""
