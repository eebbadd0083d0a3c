//! The two programs: this one, which has the lab, and `exitless` beside it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Which program runs or serves a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exitless {
    /// The product.
    Product,
    /// The lab's, whose parts can fail on purpose.
    Lab,
}

impl Exitless {
    /// Its name, by which it is found in the lab.
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
    /// Finds this program's file, and the product in the same folder.
    ///
    /// # Errors
    /// There is none.
    pub fn find() -> Result<Self> {
        let own = std::env::current_exe().context("finding this program")?;
        Self::beside(own)
    }

    fn beside(own: PathBuf) -> Result<Self> {
        let folder = own.parent().unwrap_or(Path::new("."));
        let exitless = folder.join(Exitless::Product.name());
        ensure!(
            exitless.is_file(),
            "there is no exitless beside this program, in {}: `cargo build --release -p exitless` makes it, and `make build` both",
            folder.display()
        );
        Ok(Self {
            exitless,
            exitless_lab: own,
        })
    }

    /// One of them.
    pub fn file(&self, program: Exitless) -> &Path {
        match program {
            Exitless::Product => &self.exitless,
            Exitless::Lab => &self.exitless_lab,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
