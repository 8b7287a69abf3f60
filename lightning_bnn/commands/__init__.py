"""Commands of ``lightning-bnn`` about launched runs; each module has a ``main(arguments)``."""
