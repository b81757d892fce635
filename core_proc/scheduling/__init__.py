"""The parts of the scheduler: queues, admission, grants, due requests, victims, drafts."""
