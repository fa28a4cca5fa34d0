"""One turn, from the question to the committed answer: what is wanted, the plan, the changes, the events."""
