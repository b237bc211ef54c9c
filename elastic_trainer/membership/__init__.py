"""Who is in the job: pure rules, and the member that performs them against the store."""
