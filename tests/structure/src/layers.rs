//! The order of the repository's folders, lowest first, and the arrows that go against it; the page
//! that lists their crates.

use std::collections::BTreeSet;

use crate::workspace::Package;

/// A folder, and those that its crates may be built from.
pub type Layer = (&'static str, &'static [&'static str]);

/// The folders, lowest first: each may use itself and lower ones alone.
pub const LAYERS: [Layer; 9] = [
    ("libs", &["libs"]),
    ("virt", &["libs", "virt"]),
    ("host", &["libs", "virt", "host"]),
    ("guest", &["libs", "guest"]),
    ("tests", &["libs", "virt", "tests"]),
    ("lab", &["libs", "virt", "host", "guest", "lab"]),
    ("bench", &["libs", "virt", "host", "tests", "lab", "bench"]),
    ("bin", &["libs", "virt", "host", "tests", "lab", "bin"]),
    ("fuzz", &["libs", "virt", "tests", "bench", "fuzz"]),
];

/// Where `folder` stands, from below.
fn height(folder: &str) -> Option<usize> {
    LAYERS.iter().position(|(name, _)| *name == folder)
}

/// The arrows between folders that are not allowed, in words. Packages of other people's are in no
/// folder.
///
/// Dependencies of a crate lie in a folder that its own may use. Those that only a feature brings
/// in may also be a tool of `tests/`, for measuring programs. Those of its tests are in `tests/`,
/// or no higher than itself.
pub fn arrows_up<'a>(packages: impl Iterator<Item = &'a Package> + Clone) -> Vec<String> {
    let layer_of = |name: &String| {
        let mut all = packages.clone();
        all.find(|package| package.name == *name)
            .map(|package| package.layer.as_str())
    };
    let mut found = Vec::new();
    for package in packages.clone() {
        let (name, layer) = (&package.name, package.layer.as_str());
        let Some(own) = height(layer) else {
            found.push(format!("{name} is in {layer}, which is no layer"));
            continue;
        };
        let below = LAYERS[own].1;
        let mut note = |needs: &str, other: &String, may: &dyn Fn(&str) -> bool| {
            if let Some(there) = layer_of(other).filter(|there| !may(there)) {
                found.push(format!("{name} (in {layer}) {needs} {other} (in {there})"));
            }
        };
        for other in &package.needs {
            note("needs", other, &|there| below.contains(&there));
        }
        for other in &package.may_need {
            let may = |there: &str| there == "tests" || below.contains(&there);
            note("has a feature that needs", other, &may);
        }
        for other in &package.tested_with {
            let may = |there: &str| there == "tests" || height(there).is_some_and(|at| at <= own);
            note("has tests that need", other, &may);
        }
    }
    found
}

/// The crates that a page's code map lists, and their folders. The map is the page's first fenced
/// text. A line that begins with `FOLDER/` starts a folder; in the lines below it, what stands
/// between gaps of two spaces and has no space is a crate.
fn listed(page: &str) -> BTreeSet<(&str, &str)> {
    let map = page.split("```text\n").nth(1).unwrap_or("");
    let map = map.split("```").next().unwrap_or("");
    let mut found = BTreeSet::new();
    let mut folder = "";
    for line in map.lines() {
        if let Some((name, _)) = line.split_once('/')
            && !name.contains(' ')
        {
            folder = name;
            continue;
        }
        let columns = line.split("  ").map(str::trim);
        let crates = columns.filter(|column| !column.is_empty() && !column.contains(' '));
        found.extend(crates.map(|name| (name, folder)));
    }
    found
}

/// Differences between a page's code map and the packages, in words: crates that are not listed, or
/// not in their folder, and listed ones that do not exist.
pub fn map_differences<'a>(page: &str, packages: impl Iterator<Item = &'a Package>) -> Vec<String> {
    let mut listed = listed(page);
    let mut found = Vec::new();
    for package in packages {
        let (name, layer) = (package.name.as_str(), package.layer.as_str());
        if !listed.remove(&(name, layer)) {
            found.push(format!("{name} is not listed in {layer}"));
        }
    }
    let gone = listed.into_iter();
    found.extend(gone.map(|(name, folder)| format!("there is no {name} in {folder}")));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, layer: &str) -> Package {
        Package {
            name: name.into(),
            layer: layer.into(),
            ..Package::default()
        }
    }

    /// The tree in which only `from` needs anything, in this way: `to`.
    fn arrows(
        from: &str,
        to: &str,
        need: impl Fn(&mut Package) -> &mut BTreeSet<String>,
    ) -> Vec<String> {
        let folders = LAYERS.map(|(folder, _)| package(&format!("{folder}-crate"), folder));
        let mut all = [package("from", from)].to_vec();
        all.extend(folders);
        need(&mut all[0]).insert(format!("{to}-crate"));
        need(&mut all[0]).insert("others".into());
        arrows_up(all.iter())
    }

    #[test]
    fn layers_use_themselves_and_lower_ones() {
        for (at, (folder, below)) in LAYERS.iter().enumerate() {
            for other in *below {
                assert!(
                    height(other).is_some_and(|there| there <= at),
                    "{folder}: {other}"
                );
            }
        }
    }

    #[test]
    fn every_arrow_to_a_higher_folder_is_found_however_it_is_needed() {
        for (at, (from, _)) in LAYERS.iter().enumerate() {
            for (to, _) in &LAYERS[at + 1..] {
                let up = format!("from (in {from}) needs {to}-crate (in {to})");
                assert_eq!(arrows(from, to, |p| &mut p.needs), [up]);
                let is_tool = *to == "tests";
                let by_feature = arrows(from, to, |p| &mut p.may_need);
                assert_eq!(by_feature.is_empty(), is_tool, "{by_feature:?}");
                let by_tests = arrows(from, to, |p| &mut p.tested_with);
                assert_eq!(by_tests.is_empty(), is_tool, "{by_tests:?}");
            }
        }
        assert_eq!(
            arrows("virt", "bench", |p| &mut p.tested_with),
            ["from (in virt) has tests that need bench-crate (in bench)"]
        );
    }

    #[test]
    fn arrow_to_a_lower_folder_that_is_not_allowed_is_found() {
        assert_eq!(arrows("bin", "bench", |p| &mut p.needs).len(), 1);
        assert_eq!(arrows("bin", "bench", |p| &mut p.tested_with).len(), 0);
        assert_eq!(arrows("virt", "libs", |p| &mut p.needs).len(), 0);
    }

    #[test]
    fn a_folder_that_is_no_layer_is_found() {
        let all = [package("lonely", "attic")];
        assert_eq!(
            arrows_up(all.iter()),
            ["lonely is in attic, which is no layer"]
        );
    }

    #[test]
    fn code_map_lists_each_crate_in_its_folder_and_no_other() {
        let page = "# Page\nexitless\n```text\nlibs/   know nothing of lines\n  iova  lines    two of them\n\
                    bin/    compose\n  exitless                a program\nfuzz/   targets\n  fuzz\n```\n\
                    ```text\n  vio\n```\n";
        let all = [
            ("iova", "libs"),
            ("lines", "libs"),
            ("exitless", "bin"),
            ("fuzz", "fuzz"),
        ];
        let package = |(name, layer): (&str, &str)| package(name, layer);
        assert_eq!(map_differences(page, all.map(package).iter()), [""; 0]);
        let others = [
            ("iova", "libs"),
            ("lines", "virt"),
            ("know", "libs"),
            ("fuzz", "fuzz"),
        ];
        assert_eq!(
            map_differences(page, others.map(package).iter()),
            [
                "lines is not listed in virt",
                "know is not listed in libs",
                "there is no exitless in bin",
                "there is no lines in libs",
            ]
        );
    }
}
