"""The cluster side of kvcellar: an injecting webhook and a controller of OffloadRegions.

From ``kvcellar`` it uses the contract, the errors and the geometry only. The folder
above must never become a package: ``operator`` is a module of the standard library.
"""
