"""The sidecar: it owns the regions of one pod and shows them over read-only HTTP.

Read `service.py` for what it does, `keeper.py` for the life of one region, `api.py` for what it shows.
It never touches a device, and imports neither numpy nor torch.
"""
