"""The parts of the scheduler: queues, admission, due requests, victims, drafts."""
