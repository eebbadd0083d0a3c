//! The two programs: this one, which has the lab, and `exitless` beside it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Program that runs or serves a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exitless {
    /// The product.
    Product,
    /// The lab's, whose parts can fail on purpose.
    Lab,
}

impl Exitless {
    /// Returns its name, by which it is found in the lab.
    pub fn name(self) -> &'static str {
        match self {
            Self::Product => "exitless",
            Self::Lab => "exitless-lab",
        }
    }
}

/// Files of the two programs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The product.
    pub exitless: PathBuf,
    /// This program.
    pub exitless_lab: PathBuf,
}

impl Programs {
    /// Finds this program's file, and the product in the same folder. Cargo puts a test into a
    /// folder `deps` below that of the programs: both are the ones built last then.
    ///
    /// # Errors
    /// One of them does not exist.
    pub fn find() -> Result<Self> {
        let own = std::env::current_exe().context("finding this program")?;
        Self::beside(program_of(own))
    }

    fn beside(own: PathBuf) -> Result<Self> {
        let folder = own.parent().unwrap_or(Path::new("."));
        let exitless = folder.join(Exitless::Product.name());
        ensure!(
            exitless.is_file(),
            "there is no exitless beside this program, in {}: `cargo build --release -p exitless` \
             makes it, and `make build` both",
            folder.display()
        );
        Ok(Self {
            exitless,
            exitless_lab: own,
        })
    }

    /// Returns the file of a program.
    pub fn file(&self, program: Exitless) -> &Path {
        match program {
            Exitless::Product => &self.exitless,
            Exitless::Lab => &self.exitless_lab,
        }
    }
}

/// Returns the lab's program in place of a test; any other program unchanged.
fn program_of(own: PathBuf) -> PathBuf {
    match own.parent() {
        Some(folder) if folder.ends_with("deps") => folder.with_file_name(Exitless::Lab.name()),
        _ => own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_stands_for_the_program_above_it() {
        let program = |path: &str| program_of(path.into());
        let built = Path::new("/target/release/exitless-lab");
        assert_eq!(program("/target/release/deps/assign-0123"), built);
        assert_eq!(program("/usr/bin/other"), Path::new("/usr/bin/other"));
    }

    #[test]
    fn the_product_is_beside_this_program_or_it_is_said_how_to_make_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = folder.path().join("exitless-lab");
        let error = Programs::beside(own.clone()).expect_err("it is not there");
        let error = error.to_string();
        assert!(
            error.contains("cargo build --release -p exitless"),
            "{error}"
        );
        assert!(error.contains(&folder.path().display().to_string()));
        std::fs::write(folder.path().join("exitless"), "").expect("a file");
        let programs = Programs::beside(own.clone()).expect("it is there");
        assert_eq!(programs.file(Exitless::Lab), own);
        assert_eq!(
            programs.file(Exitless::Product),
            folder.path().join("exitless")
        );
    }
}
