//! Directed graphs of names.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Names, and for each those that it names.
#[derive(Clone, Debug, Default)]
pub struct Graph(BTreeMap<String, BTreeSet<String>>);

impl Graph {
    /// Notes that `from` names `to`. A name that names itself is not noted.
    pub fn add(&mut self, from: &str, to: &str) {
        if from != to {
            self.0.entry(from.into()).or_default().insert(to.into());
        }
    }

    fn after(&self, node: &str) -> impl Iterator<Item = &String> {
        self.0.get(node).into_iter().flatten()
    }

    /// The shortest way from `from` to `to`, both included, of at least one step.
    pub fn way(&self, from: &str, to: &str) -> Option<Vec<String>> {
        let mut before: BTreeMap<&str, &str> = BTreeMap::new();
        let mut queue = VecDeque::from([from]);
        while let Some(node) = queue.pop_front() {
            for next in self.after(node) {
                if next == to {
                    let back = std::iter::successors(Some(node), |&at| before.get(at).copied());
                    let mut way: Vec<_> = back.map(str::to_owned).collect();
                    way.reverse();
                    way.push(to.to_owned());
                    return Some(way);
                }
                if next != from && !before.contains_key(next.as_str()) {
                    before.insert(next, node);
                    queue.push_back(next);
                }
            }
        }
        None
    }

    /// Groups of nodes each of which reaches all others of its group.
    pub fn cycles(&self) -> Vec<BTreeSet<String>> {
        let mut groups = BTreeSet::new();
        for node in self.0.keys().filter(|node| self.way(node, node).is_some()) {
            let is_mutual = |other: &&String| {
                *other == node || self.way(node, other).is_some() && self.way(other, node).is_some()
            };
            groups.insert(self.0.keys().filter(is_mutual).cloned().collect());
        }
        groups.into_iter().collect()
    }

    /// A way round in `group`, in words.
    pub fn round(&self, group: &BTreeSet<String>) -> String {
        let rounds = group.iter().filter_map(|node| self.way(node, node));
        let shortest = rounds.min_by_key(Vec::len).unwrap_or_default();
        shortest.join(" → ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &str)]) -> Graph {
        let mut graph = Graph::default();
        for (from, to) in edges {
            graph.add(from, to);
        }
        graph
    }

    #[test]
    fn a_tree_has_no_cycle() {
        let tree = graph(&[("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "a")]);
        assert!(tree.cycles().is_empty());
    }

    #[test]
    fn a_cycle_is_named_with_its_way_round() {
        let graph = graph(&[("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("x", "a")]);
        let cycles = graph.cycles();
        assert_eq!(cycles, [BTreeSet::from(["a", "b", "c"].map(String::from))]);
        assert_eq!(graph.round(&cycles[0]), "a → b → c → a");
    }

    #[test]
    fn two_cycles_are_two() {
        let graph = graph(&[("a", "b"), ("b", "a"), ("b", "c"), ("c", "d"), ("d", "c")]);
        assert_eq!(graph.cycles().len(), 2);
    }
}
