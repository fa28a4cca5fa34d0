"""K/V: live sessions, the passage bank and its tiers, snapshots, and what is read ahead."""
