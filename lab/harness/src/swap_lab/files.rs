//! Files that are the emulated host's disks.

use std::path::PathBuf;

use anyhow::{Context, Result};

/// Disks in a directory of their own; removed at the end.
pub struct Files {
    dir: PathBuf,
    disks: Vec<PathBuf>,
}

impl Files {
    /// Creates a file of each size in bytes, which take no space yet: `/dev/vda`, `/dev/vdb` and
    /// on.
    ///
    /// # Errors
    /// The system's own.
    pub fn make(bytes: &[u64]) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("exitless-swap-lab-{}", std::process::id()));
        std::fs::create_dir(&dir).with_context(|| format!("making {}", dir.display()))?;
        let disks = (0..bytes.len()).map(|it| dir.join(format!("disk{it}.img")));
        let this = Self {
            disks: disks.collect(),
            dir,
        };
        for (file, bytes) in this.disks.iter().zip(bytes) {
            let made = std::fs::File::create(file).and_then(|file| file.set_len(*bytes));
            made.with_context(|| format!("making {}", file.display()))?;
        }
        Ok(this)
    }

    /// Returns the files, in their order.
    pub fn disks(&self) -> Vec<PathBuf> {
        self.disks.clone()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
