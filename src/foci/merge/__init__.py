"""The algebra of summaries that merge; imports torch only."""
