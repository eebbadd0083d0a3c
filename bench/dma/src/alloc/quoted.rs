//! What others reached, quoted: Linux 7.3.4's own code compiled into a user-space shim, LLFree, and three Rust crates,
//! measured by another program on another machine (2 CPUs of a Firecracker guest on a Sapphire Rapids class Xeon,
//! Linux 6.18; floor 1.67 ns, round trip 115-128 ns). One thread in processor time, two on the wall; nanoseconds of a
//! pair per thread, medians of 5 runs. No interrupts are disabled there as a kernel would, which flatters it.

/// Workload, threads, the path through per-CPU caches, the tree behind them.
const LINUX: [(&str, usize, &str, &str); 16] = [
    ("a1", 1, "21.0", "322"),
    ("a1", 2, "21.3", "2997"),
    ("a32", 1, "21.5", "34.5"),
    ("a32", 2, "21.6", "1255"),
    ("a256", 1, "21.6", "40.1"),
    ("a256", 2, "25.1", "754"),
    ("a1_w4096", 1, "21.4", "3511"),
    ("a1_w65536", 1, "22.0", "59675"),
    ("b32", 2, "20.2", "349"),
    ("b1", 2, "66.6", "401"),
    ("c1", 1, "21.6", "339"),
    ("c1", 2, "23.1", "2873"),
    ("c32", 1, "22.0", "80.6"),
    ("c32", 2, "24.6", "1275"),
    ("x32", 2, "3.8 (loop alone)", ""),
    ("x1", 2, "11.1 (loop alone)", ""),
];

/// Workload, threads, nanoseconds.
type Figure = (&'static str, usize, &'static str);

/// Crate, a-1 and c-1 with one and two threads.
const PEERS: [(&str, [Figure; 4]); 4] = [
    (
        "range_alloc",
        [
            ("a1", 1, "39.8"),
            ("a1", 2, "357"),
            ("c1", 1, "426"),
            ("c1", 2, "1776"),
        ],
    ),
    (
        "offset_allocator",
        [
            ("a1", 1, "43.0"),
            ("a1", 2, "146"),
            ("c1", 1, "67.9"),
            ("c1", 2, "271"),
        ],
    ),
    (
        "vm_allocator",
        [
            ("a1", 1, "2550"),
            ("a1", 2, "10867"),
            ("c1", 1, "4865"),
            ("c1", 2, "22207"),
        ],
    ),
    (
        "llfree",
        [
            ("a1", 1, "65.0"),
            ("a1", 2, "67"),
            ("c1", 1, "82.8"),
            ("c1", 2, "125"),
        ],
    ),
];

/// Linux's figures for a workload, as a table shows them; empty where there are none.
pub fn linux(workload: &str, threads: usize) -> String {
    LINUX
        .iter()
        .find(|(name, of, ..)| (*name, *of) == (workload, threads))
        .map_or_else(String::new, |(_, _, cached, tree)| match *tree {
            "" => (*cached).to_owned(),
            tree => format!("{cached} cached, {tree} tree"),
        })
}

/// A crate's figure on the reference machine; empty where there is none.
pub fn peer(subject: &str, workload: &str, threads: usize) -> &'static str {
    PEERS
        .iter()
        .find(|(name, _)| *name == subject)
        .and_then(|(_, rows)| {
            rows.iter()
                .find(|(name, of, _)| (*name, *of) == (workload, threads))
        })
        .map_or("", |(_, _, text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_quoted_is_left_blank() {
        assert_eq!(linux("a1", 2), "21.3 cached, 2997 tree");
        assert_eq!(
            (linux("a1_w65536", 2), peer("llfree", "b32", 2)),
            (String::new(), "")
        );
        assert_eq!(peer("llfree", "c1", 2), "125");
    }
}
