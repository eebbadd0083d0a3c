//! Memory use of a compressor. Its input streams through the page cache; a window of the blocks
//! read last stays in its own memory and is read at positions that depend on the data; its output
//! goes through the page cache as well.
//!
//! The input is cut into blocks. For each one, an earlier block is chosen from the window; the two
//! give a quarter block of output. Both come from the pattern, so the output can be computed
//! without the window; it is compared with that result when all of it has been written.
//!
//! After the paper's pbzip2. Left out: output that shrinks with the redundancy of the input;
//! several threads; time.

use std::path::PathBuf;

use crate::area::Area;
use crate::memory::Memory;
use crate::pattern::{self, Checksum};
use crate::phases::{self, Phases};
use crate::{BLOCK, age};

/// Input blocks for one block of output.
const RATIO: usize = 4;
/// Bytes of output for one block.
const PIECE: usize = BLOCK / RATIO;
/// Blocks of one read(2): 128 KiB, the size of Linux's read-ahead by default.
const READ: u64 = 32;

/// Configuration of a run.
#[derive(Debug, Clone)]
pub struct CompressConfig {
    /// The disk, or a file; has the pattern in front.
    pub disk: PathBuf,
    /// MiB of the pattern.
    pub mib: u64,
    /// MiB of the window.
    pub window_mib: u64,
    /// Number of phases; one more follows, which reads the output.
    pub phases: u64,
    /// Seed of the pattern.
    pub seed: u64,
}

/// Compresses the input, and checks the output. Calls `mark` before each phase and after the last.
/// Returns the output's checksum, or `None` where memory was too short.
///
/// # Errors
/// The first wrong byte, or the system's error, as text.
pub fn run(config: &CompressConfig, mark: &mut dyn FnMut(u8)) -> Result<Option<u64>, String> {
    let output = age::pages(config.mib)? / RATIO;
    let area = Area::open(&config.disk, config.mib, output as u64, config.seed)?;
    let window = age::map(age::pages(config.window_mib)?)?;
    phases::run(config.phases + 1, mark, |phases| {
        compress(config, &area, window, phases)
    })
}

fn compress(
    config: &CompressConfig,
    area: &Area,
    mut window: Memory,
    phases: &mut Phases<'_>,
) -> Result<Option<u64>, String> {
    let pages = window.pages() as u64;
    let mut sum = Checksum::default();
    let mut data = [0; READ as usize * BLOCK];
    // A whole number of MiB is a whole number of reads.
    let reads = area.input / READ;
    for phase in 0..config.phases {
        phases.begin();
        let of = |phase| reads * phase / config.phases;
        for read in of(phase)..of(phase + 1) {
            let first = read * READ;
            area.read(first, &mut data)?;
            let mut out = [0; READ as usize * PIECE];
            let blocks = data.chunks(BLOCK).zip(out.chunks_mut(PIECE));
            for (number, (block, piece)) in (first..).zip(blocks) {
                let place = |number: u64| {
                    let page = (number % pages) as usize;
                    page..page + 1
                };
                window.bytes_mut(place(number)).copy_from_slice(block);
                let before = chosen(block, number, pages);
                pack(block, window.bytes(place(before)), piece);
            }
            sum.add(&out);
            area.write(first / RATIO as u64, &out)?;
        }
    }
    phases.begin();
    area.sync()?;
    check(config, area, pages)?;
    Ok(Some(sum.value()))
}

/// Reads the output, and compares it with the one computed from the pattern.
fn check(config: &CompressConfig, area: &Area, pages: u64) -> Result<(), String> {
    let mut found = [0; BLOCK];
    let mut wanted = [0; BLOCK];
    let [mut block, mut before] = [[0; BLOCK]; 2];
    for output in 0..area.input / RATIO as u64 {
        area.read_output(output, &mut found)?;
        for (number, piece) in (output * RATIO as u64..).zip(wanted.chunks_mut(PIECE)) {
            let fill = |number: u64, data: &mut [u8]| {
                pattern::fill(config.seed, number * BLOCK as u64, data);
            };
            fill(number, &mut block);
            fill(chosen(&block, number, pages), &mut before);
            pack(&block, &before, piece);
        }
        if let Some(at) = (0..BLOCK).find(|at| found[*at] != wanted[*at]) {
            return Err(format!(
                "block {output} of the output: byte {at:#x} is {:#04x}, wanted {:#04x}",
                found[at], wanted[at]
            ));
        }
    }
    Ok(())
}

/// Returns the number of an earlier block of the window, chosen by the content of block `number`.
fn chosen(block: &[u8], number: u64, pages: u64) -> u64 {
    let word = block.first_chunk().expect("a block has a word");
    number - u64::from_le_bytes(*word) % pages.min(number + 1)
}

fn pack(block: &[u8], before: &[u8], piece: &mut [u8]) {
    let [blocks, befores] = [block, before].map(|data| data.chunks(RATIO));
    for ((block, before), byte) in blocks.zip(befores).zip(piece) {
        let sum = |data: &[u8]| {
            data.iter()
                .fold(0_u8, |sum, byte| sum.rotate_left(1) ^ byte)
        };
        *byte = sum(block) ^ sum(before).rotate_left(3);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::area::tests::{Image, SEED};

    fn config(image: &Image) -> CompressConfig {
        CompressConfig {
            disk: image.0.clone(),
            mib: 2,
            window_mib: 1,
            phases: 3,
            seed: SEED,
        }
    }

    #[test]
    fn output_is_a_quarter_and_has_the_same_sum_each_time() {
        let image = Image::new("compress");
        let mut marks = Vec::new();
        let sum = run(&config(&image), &mut |mark| marks.push(mark)).unwrap();
        assert_eq!(marks, [16, 17, 18, 19, 35]);
        let output = std::fs::read(&image.0).unwrap();
        let output = &output[2 << 20..];
        assert_eq!(sum, Some(Checksum::of(&output[..512 << 10])));
        assert!(output[512 << 10..].iter().all(|byte| *byte == 0));
        assert_eq!(run(&config(&image), &mut |_| {}).unwrap(), sum);
    }

    #[test]
    fn output_that_changes_before_it_is_read_is_found() {
        let image = Image::new("output");
        let wrong = run(&config(&image), &mut |mark| {
            if mark == 19 {
                image.damage((2 << 20) + 3 * BLOCK as u64 + 7);
            }
        });
        assert!(
            wrong
                .unwrap_err()
                .starts_with("block 3 of the output: byte 0x7 is")
        );
    }

    #[test]
    fn the_window_has_what_is_chosen() {
        let block = u64::MAX.to_le_bytes();
        for number in 0..600 {
            let before = chosen(&block, number, 256);
            assert!(before <= number && number - before < 256);
        }
    }
}
