use super::*;

type Copy = unsafe fn(*mut u8, *mut u8, usize);

/// Every length around the thresholds at every alignment: the bytes arrive, and no other changes.
fn check(copy: Copy) {
    let lens = match cfg!(miri) {
        true => vec![0, 1, 7, 8, 9, 31],
        false => (0..200).chain(1500..1560).chain([4096, 5000]).collect(),
    };
    let step = if cfg!(miri) { 3 } else { 1 };
    let mut src: Vec<u8> = (0..lens[lens.len() - 1] + 17)
        .map(|at| (at * 31 / 7) as u8 | 1)
        .collect();
    for &len in &lens {
        for from in (0..17).step_by(step) {
            // 64: the place to which the string copy aligns.
            for to in [0, 1, 3, 7, 8, 15, 16, 17, 40, 63, 64, 65] {
                let mut dst = vec![0u8; len + 160];
                // SAFETY: `from` is at most 16 and `len` the last one or less; `to` is at most 65;
                // the buffers are two.
                unsafe { copy(src.as_mut_ptr().add(from), dst.as_mut_ptr().add(to), len) };
                assert!(
                    dst[to..to + len] == src[from..from + len],
                    "{len} {from} {to}"
                );
                let beside = dst[..to].iter().chain(&dst[to + len..]);
                assert!(beside.copied().all(|byte| byte == 0), "{len} {from} {to}");
            }
        }
    }
}

#[test]
fn copies_move_their_bytes_and_no_others() {
    check(|src, dst, len| {
        // SAFETY: `check` gives two separate ranges of `len` bytes.
        unsafe { copy::out_of_shared(src, dst, len) }
    });
    check(|src, dst, len| {
        // SAFETY: as above.
        unsafe { copy::into_shared(src, dst, len) }
    });
}

#[test]
fn portable_copies_do_too() {
    check(|src, dst, len| {
        // SAFETY: as above.
        unsafe { portable::out_of_shared(src, dst, len) }
    });
    check(|src, dst, len| {
        // SAFETY: as above.
        unsafe { portable::into_shared(src, dst, len) }
    });
}
