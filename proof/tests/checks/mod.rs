//! What the checks of all models share.

use std::{fmt::Debug, hash::Hash, time::Instant};

use stateright::{Checker, HasDiscoveries, Model};

/// Checks that a search has ended and found nothing, and prints how many states there are.
pub fn holds<M: Model + Debug>(protocol: &M, checked: &impl Checker<M>, begun: Instant)
where
    M::State: Clone + Debug + Hash + PartialEq,
    M::Action: Clone + Debug + PartialEq,
{
    let (states, depth) = (checked.unique_state_count(), checked.max_depth());
    let seconds = begun.elapsed().as_secs_f64();
    eprintln!("{protocol:?}: {states} states, {depth} steps, {seconds:.0} s");
    assert!(checked.is_done());
    checked.assert_properties();
}

/// Looks for an order of steps in which this does not hold, the shortest first.
pub fn fails<M>(protocol: M, variant: impl Debug, property: &'static str)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let one = HasDiscoveries::AllOf([property].into());
    let checked = protocol.checker().threads(2).finish_when(one).spawn_bfs().join();
    let path = checked.discovery(property).unwrap_or_else(|| panic!("{variant:?} is not caught"));
    let states = checked.unique_state_count();
    eprintln!("{variant:?}: \"{property}\" fails, found after {states} states:");
    path.into_actions().iter().for_each(|it| eprintln!("  {it:?}"));
}
