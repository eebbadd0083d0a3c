//! A disk, or a file, accessed through the page cache: the pattern in front, the output of a
//! workload behind it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::age::{self, MIB};
use crate::{BLOCK, block, device, pattern};

/// A disk whose first MiB hold the pattern, and whose other blocks are written to.
#[derive(Debug)]
pub(crate) struct Area {
    path: PathBuf,
    file: File,
    /// Number of blocks of the pattern.
    pub input: u64,
    seed: u64,
}

impl Area {
    /// Opens `path`, which has the pattern of `seed` in its first `mib` MiB and `output` blocks
    /// behind it.
    ///
    /// # Errors
    /// A description, with advice.
    pub fn open(path: &Path, mib: u64, output: u64, seed: u64) -> Result<Self, String> {
        let input = age::pages(mib)? as u64;
        let explain = |error: io::Error| device::explain(path, &error);
        let file = device::open_cached(path, true).map_err(explain)?;
        let blocks = device::blocks(&file).map_err(explain)?;
        if blocks < input + output {
            return Err(format!(
                "{}: has {} MiB, and {mib} to read with {} to write behind them are wanted: take a \
                 smaller --mib, or a \
                 larger disk",
                path.display(),
                blocks / MIB,
                output.div_ceil(MIB),
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            input,
            seed,
        })
    }

    /// Reads blocks of the pattern from `first` on, and checks them.
    ///
    /// # Errors
    /// A description of the first difference.
    pub fn read(&self, first: u64, data: &mut [u8]) -> Result<(), String> {
        let at = first * BLOCK as u64;
        self.read_raw(first, data)?;
        pattern::check(self.seed, at, data).map_err(|wrong| self.at(first, &wrong))
    }

    /// Reads a block of the output, which has to be sealed with its number and `generation`.
    ///
    /// # Errors
    /// A description of the difference.
    pub fn read_sealed(&self, number: u64, generation: u64) -> Result<(), String> {
        let mut data = [0; BLOCK];
        self.read_output(number, &mut data)?;
        block::check(&data, number, generation, self.seed)
            .map_err(|damage| self.at(self.input + number, &damage.to_string()))
    }

    /// Reads blocks of the output from `first` on, without checking them.
    ///
    /// # Errors
    /// The system's own, in words.
    pub fn read_output(&self, first: u64, data: &mut [u8]) -> Result<(), String> {
        self.read_raw(self.input + first, data)
    }

    /// Writes blocks of the output from `first` on.
    ///
    /// # Errors
    /// The system's own, in words.
    pub fn write(&self, first: u64, data: &[u8]) -> Result<(), String> {
        let number = self.input + first;
        let wrote = self.file.write_all_at(data, number * BLOCK as u64);
        wrote.map_err(|error| self.at(number, &error.to_string()))
    }

    /// Waits until everything written is on the disk.
    ///
    /// # Errors
    /// The system's own, in words.
    pub fn sync(&self) -> Result<(), String> {
        let synced = self.file.sync_data();
        synced.map_err(|error| device::explain(&self.path, &error))
    }

    fn read_raw(&self, number: u64, data: &mut [u8]) -> Result<(), String> {
        let read = self.file.read_exact_at(data, number * BLOCK as u64);
        read.map_err(|error| self.at(number, &error.to_string()))
    }

    fn at(&self, number: u64, wrong: &str) -> String {
        format!("{}: from block {number} on: {wrong}", self.path.display())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;

    use super::*;

    pub const SEED: u64 = 4;

    /// 2 MiB of the pattern, and as many behind it; removed at the end.
    pub struct Image(pub PathBuf);

    impl Image {
        pub fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("area-{name}-{}", std::process::id()));
            let mut data = vec![0; 4 << 20];
            pattern::fill(SEED, 0, &mut data[..2 << 20]);
            fs::write(&path, data).unwrap();
            Self(path)
        }

        /// Changes a byte.
        pub fn damage(&self, at: u64) {
            let file = File::options().read(true).write(true).open(&self.0);
            let file = file.unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        }
    }

    impl Drop for Image {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    #[test]
    fn reads_are_checked_and_output_lies_behind_the_pattern() {
        let image = Image::new("checked");
        let area = Area::open(&image.0, 2, 512, SEED).unwrap();
        let mut data = vec![0; 2 * BLOCK];
        area.read(3, &mut data).unwrap();
        let mut sealed = [0; BLOCK];
        block::seal(&mut sealed, 1, 9, SEED);
        area.write(1, &sealed).unwrap();
        area.sync().unwrap();
        assert_eq!(area.read_sealed(1, 9), Ok(()));
        assert!(area.read_sealed(1, 8).is_err());
        // The last of the pattern is as it was.
        area.read(511, &mut data[..BLOCK]).unwrap();
        image.damage(4 * BLOCK as u64 + 5);
        let wrong = area.read(3, &mut data).unwrap_err();
        assert!(wrong.contains("from block 3 on: byte 0x4005"), "{wrong}");
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused_with_what_helps() {
        let image = Image::new("small");
        let wrong = Area::open(&image.0, 2, 513, SEED).unwrap_err();
        assert!(
            wrong.contains("has 4 MiB, and 2 to read with 3 to write"),
            "{wrong}"
        );
    }
}
