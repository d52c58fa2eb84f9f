"""Every scene, by its name."""

from tests.support.scenes import alone, engine, owner, pinning, stock
from tests.support.scenes.scene import Scene

SCENES: dict[str, type[Scene]] = {
    scene.__name__: scene
    for scene in (
        owner.Make,
        owner.Reserve,
        owner.ReserveSmallPages,
        owner.Settle,
        owner.Adopt,
        owner.Anew,
        owner.Resume,
        owner.Look,
        owner.Release,
        owner.Clean,
        engine.Attach,
        engine.NewGeneration,
        engine.AttachRankZeroOfTwo,
        engine.AttachRankOneOfTwo,
        engine.AttachScheduler,
        engine.Detach,
        engine.Mark,
        pinning.PinRankZeroOfTwo,
        pinning.PinRankOneOfTwo,
        pinning.Unpin,
        alone.OwnRegion,
        alone.OwnScheduler,
        alone.OwnDetach,
        stock.StockMake,
        stock.StockJoin,
        stock.StockAdopt,
        stock.StockAgain,
        stock.StockRelease,
        stock.Janitors,
        stock.JanitorResumes,
        stock.JanitorPutsBack,
        stock.StockClean,
    )
}
