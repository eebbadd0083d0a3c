//! Linux's own IOVA allocator (`iova.c`) and IOMMU page tables (`generic_pt`, VT-d second stage),
//! unmodified, in user space.
//!
//! `scripts/linux-iova.sh` builds them outside this tree, from Debian's kernel source and the shim
//! in `shim/`, into a shared object, which [`Linux::load`] opens. Where it is not available,
//! nothing is measured here, and reports omit ratios to Linux. The parts of the kernel that the
//! shim leaves out (interrupts, timers, statistics) would only cost time: `shim/shim.h` lists them.
//!
//! A [`Domain`] is an IOVA space and a page table. A thread declares once which CPU it is
//! ([`Linux::enter`]); CPUs share only the data that Linux's share. Numbers are page numbers of 4
//! KiB; 0 is no page.
//!
//! UNSAFETY: the whole crate is an interface to a C library that is loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::mem;
use std::path::Path;
use std::ptr::NonNull;

use anyhow::{Context, Result, bail};

/// Greatest number of CPUs of a domain, as the shim defines it.
pub const CPUS: usize = 4;

type Raw = *mut c_void;

/// The loaded library.
pub struct Linux {
    version: String,
    set_cpu: unsafe extern "C" fn(c_uint),
    bytes: unsafe extern "C" fn() -> c_long,
    domain_new: unsafe extern "C" fn(c_ulong) -> Raw,
    domain_free: unsafe extern "C" fn(Raw),
    alloc: unsafe extern "C" fn(Raw, c_ulong, c_ulong, bool) -> c_ulong,
    free: unsafe extern "C" fn(Raw, c_ulong, c_ulong),
    map: unsafe extern "C" fn(Raw, c_ulong, u64, usize, usize) -> c_int,
    unmap: unsafe extern "C" fn(Raw, c_ulong, usize, usize) -> usize,
    dma_map: unsafe extern "C" fn(Raw, u64, usize, usize, c_ulong) -> c_ulong,
    dma_unmap: unsafe extern "C" fn(Raw, c_ulong, usize, usize),
}

impl Linux {
    /// Opens the shared object that `scripts/linux-iova.sh` named; it stays open.
    ///
    /// # Errors
    /// The file does not exist, or is another library.
    #[expect(
        clippy::missing_transmute_annotations,
        reason = "each function's type stands at the field it is stored in"
    )]
    pub fn load(path: &Path) -> Result<&'static Self> {
        let name = CString::new(path.as_os_str().as_encoded_bytes())?;
        // SAFETY: the name is a C string; the library has no constructors but the compiler's.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            bail!("{} cannot be loaded", path.display());
        }
        let symbol = |name: &CStr| -> Result<NonNull<c_void>> {
            // SAFETY: the library was opened above and is never closed.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            NonNull::new(found).with_context(|| format!("no {} in it", name.to_string_lossy()))
        };
        // Each function is declared with this signature in `shim/abi.c` or, for the first two, by
        // the kernel's `iova.h` (a domain begins with its IOVA space). Its address stays valid,
        // since the library is never closed.
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: as said above.
                unsafe { mem::transmute(symbol($name)?) }
            };
        }
        let version: unsafe extern "C" fn() -> *const c_char = function!(c"shim_version");
        // SAFETY: it returns a string constant.
        let version = unsafe { CStr::from_ptr(version()) };
        Ok(Box::leak(Box::new(Self {
            alloc: function!(c"alloc_iova_fast"),
            free: function!(c"free_iova_fast"),
            version: version.to_string_lossy().into_owned(),
            set_cpu: function!(c"shim_set_cpu"),
            bytes: function!(c"shim_bytes"),
            domain_new: function!(c"shim_domain_new"),
            domain_free: function!(c"shim_domain_free"),
            map: function!(c"shim_map"),
            unmap: function!(c"shim_unmap"),
            dma_map: function!(c"shim_dma_map"),
            dma_unmap: function!(c"shim_dma_unmap"),
        })))
    }

    /// Returns the kernel's version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Makes the calling thread this CPU from now on.
    ///
    /// # Panics
    /// If `cpu` is not less than [`CPUS`].
    pub fn enter(&self, cpu: usize) {
        assert!(cpu < CPUS, "{cpu}");
        // SAFETY: it stores two words of the thread.
        unsafe { (self.set_cpu)(cpu as c_uint) }
    }

    /// Returns the bytes that all domains together use: ranges, magazines, tables. Only the
    /// difference of two calls is meaningful, if no other thread works between them.
    pub fn bytes(&self) -> i64 {
        // SAFETY: it reads one word.
        unsafe { (self.bytes)() }
    }
}

/// An IOVA space and a page table of four levels.
pub struct Domain {
    linux: &'static Linux,
    raw: NonNull<c_void>,
}

// SAFETY: the kernel uses a domain on all CPUs at once: its allocator takes locks, and the
// conditions of its table are those of `map` and `unmap`.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// Creates an empty domain, whose lowest page is `first`.
    ///
    /// # Errors
    /// No memory.
    pub fn new(linux: &'static Linux, first: u64) -> Result<Self> {
        // SAFETY: any number is valid.
        let raw = unsafe { (linux.domain_new)(first) };
        let raw = NonNull::new(raw).context("no memory for a domain")?;
        Ok(Self { linux, raw })
    }

    /// Returns the library.
    pub fn linux(&self) -> &'static Linux {
        self.linux
    }

    /// Allocates `pages` pages, aligned to the next power of two, none above `last`. Returns the
    /// first, or 0 if there is no room. With `flushes` the caches of all CPUs are emptied before it
    /// fails.
    #[inline]
    pub fn alloc(&self, pages: u64, last: u64, flushes: bool) -> u64 {
        // SAFETY: a domain begins with its IOVA space, and lives as long as `self`.
        unsafe { (self.linux.alloc)(self.raw.as_ptr(), pages, last, flushes) }
    }

    /// Frees a range of this size. If it was not allocated so, the kernel's code ends the program
    /// at some later time.
    #[inline]
    pub fn free(&self, first: u64, pages: u64) {
        // SAFETY: as above; a wrong number in a cache is detected when the cache is emptied.
        unsafe { (self.linux.free)(self.raw.as_ptr(), first, pages) }
    }

    /// Maps `n` pages of `size` bytes at `phys`, in the page table only.
    ///
    /// # Errors
    /// The kernel's error number, negative.
    ///
    /// # Safety
    /// No other thread maps or unmaps any of these pages at the same time.
    #[inline]
    pub unsafe fn map(&self, first: u64, phys: u64, size: usize, n: usize) -> Result<(), i32> {
        // SAFETY: the caller's promise is the condition of the table.
        match unsafe { (self.linux.map)(self.raw.as_ptr(), first << 12, phys, size, n) } {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// Unmaps `n` pages of `size` bytes, and returns the number of bytes unmapped. Tables that this
    /// range covers completely are freed.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    #[inline]
    pub unsafe fn unmap(&self, first: u64, size: usize, n: usize) -> usize {
        // SAFETY: the caller's promise is the condition of the table.
        unsafe { (self.linux.unmap)(self.raw.as_ptr(), first << 12, size, n) }
    }

    /// Allocates IOVA pages for `n` pages of `size` bytes at `phys` and maps them. Returns the
    /// first, or 0.
    #[inline]
    pub fn dma_map(&self, phys: u64, size: usize, n: usize, last: u64) -> u64 {
        // SAFETY: this call has allocated the pages, so no other mapping has them.
        unsafe { (self.linux.dma_map)(self.raw.as_ptr(), phys, size, n, last) }
    }

    /// Unmaps `n` pages of `size` bytes, then frees the IOVA pages.
    ///
    /// # Safety
    /// [`dma_map`](Self::dma_map) returned `first` for the same size and number, and no other
    /// thread unmaps it.
    #[inline]
    pub unsafe fn dma_unmap(&self, first: u64, size: usize, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { (self.linux.dma_unmap)(self.raw.as_ptr(), first, size, n) }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: `&mut self`: no other reference to the domain is left.
        unsafe { (self.linux.domain_free)(self.raw.as_ptr()) }
    }
}
