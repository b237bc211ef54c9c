"""The loop written for you: a job described by one YAML file, a task, and a trainer that survives."""
