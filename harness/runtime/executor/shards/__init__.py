"""How one block of one operator is computed, by kind of operator."""
