"""What the scheduler is built from: queues, admission, due requests, victims, drafts."""
