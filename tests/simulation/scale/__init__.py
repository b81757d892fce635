"""Many replicas in virtual time: the real router and the real schedulers, with modelled steps."""
