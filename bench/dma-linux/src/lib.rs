//! Linux's own IOVA allocator (`iova.c`) and IOMMU page tables (`generic_pt`, VT-d second stage),
//! unmodified, in user space.
//!
//! `scripts/linux-iova.sh` builds them outside this tree, from Debian's kernel source and the shim
//! in `shim/`, into a shared object; [`Linux::load`] opens it. Where it is not available, nothing
//! here is measured, and the reports of ratios say so. What the shim leaves out (interrupts,
//! timers, statistics) flatters Linux: `shim/shim.h` lists it.
//!
//! A [`Domain`] is an IOVA space and a table. A thread says once which CPU it is
//! ([`Linux::enter`]); CPUs share nothing but what Linux's do. Numbers are page numbers of 4 KiB; 0
//! is no page.
//!
//! UNSAFETY: the whole crate is the interface to a C library that is loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::mem;
use std::path::Path;
use std::ptr::NonNull;

use anyhow::{Context, Result, bail};

/// Most CPUs of a domain: the shim's.
pub const CPUS: usize = 4;

type Raw = *mut c_void;

/// The library.
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
    /// It is not there, or is another.
    #[expect(
        clippy::missing_transmute_annotations,
        reason = "each function's type stands at the field it is stored in"
    )]
    pub fn load(path: &Path) -> Result<&'static Self> {
        let name = CString::new(path.as_os_str().as_encoded_bytes())?;
        // SAFETY: a C string; the library's constructors are the compiler's own.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            bail!("{} cannot be loaded", path.display());
        }
        let symbol = |name: &CStr| -> Result<NonNull<c_void>> {
            // SAFETY: the library was opened above and is never closed.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            NonNull::new(found).with_context(|| format!("no {} in it", name.to_string_lossy()))
        };
        // Each is declared with this very signature in `shim/abi.c` or, for the first two, by the
        // kernel's `iova.h` (a domain begins with its space), and stays where it is, since the
        // library is never closed.
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

    /// The kernel's version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// From now on the calling thread is this CPU.
    ///
    /// # Panics
    /// There are [`CPUS`].
    pub fn enter(&self, cpu: usize) {
        assert!(cpu < CPUS, "{cpu}");
        // SAFETY: it stores two words of the thread.
        unsafe { (self.set_cpu)(cpu as c_uint) }
    }

    /// Bytes that all domains together use: ranges, magazines, tables. As the difference of two
    /// calls of a thread between which no other one works.
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

// SAFETY: a kernel uses a domain on every CPU at once; its allocator locks, and its table says what
// callers must not do.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// An empty one; its lowest page is `first`.
    ///
    /// # Errors
    /// No memory.
    pub fn new(linux: &'static Linux, first: u64) -> Result<Self> {
        // SAFETY: any number will do.
        let raw = unsafe { (linux.domain_new)(first) };
        let raw = NonNull::new(raw).context("no memory for a domain")?;
        Ok(Self { linux, raw })
    }

    /// The library.
    pub fn linux(&self) -> &'static Linux {
        self.linux
    }

    /// `pages` pages, aligned to the power of two that holds them, none above `last`; 0 where there
    /// are none. With `flushes` the caches of all CPUs are emptied before it gives up.
    #[inline]
    pub fn alloc(&self, pages: u64, last: u64, flushes: bool) -> u64 {
        // SAFETY: a domain begins with its space, and is there for as long as this.
        unsafe { (self.linux.alloc)(self.raw.as_ptr(), pages, last, flushes) }
    }

    /// Takes them back. Others than were allocated end the program at some later time.
    #[inline]
    pub fn free(&self, first: u64, pages: u64) {
        // SAFETY: as above; a cache that holds a wrong number is found out when it is emptied.
        unsafe { (self.linux.free)(self.raw.as_ptr(), first, pages) }
    }

    /// Maps `n` pages of `size` bytes at `phys`, in the table alone.
    ///
    /// # Errors
    /// The kernel's error number, negative.
    ///
    /// # Safety
    /// No other thread maps or unmaps any of these pages at the same time.
    #[inline]
    pub unsafe fn map(&self, first: u64, phys: u64, size: usize, n: usize) -> Result<(), i32> {
        // SAFETY: the caller's promise is the one that the table asks for.
        match unsafe { (self.linux.map)(self.raw.as_ptr(), first << 12, phys, size, n) } {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// Unmaps them, and says how many bytes that were; tables that this covers whole are freed.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    #[inline]
    pub unsafe fn unmap(&self, first: u64, size: usize, n: usize) -> usize {
        // SAFETY: the caller's promise is the one that the table asks for.
        unsafe { (self.linux.unmap)(self.raw.as_ptr(), first << 12, size, n) }
    }

    /// Allocates pages for `n` pages of `size` bytes at `phys` and maps them; the first, or 0.
    #[inline]
    pub fn dma_map(&self, phys: u64, size: usize, n: usize, last: u64) -> u64 {
        // SAFETY: the pages were allocated by this call, so no other mapping has them.
        unsafe { (self.linux.dma_map)(self.raw.as_ptr(), phys, size, n, last) }
    }

    /// Unmaps them and frees the pages, strictly in this order.
    ///
    /// # Safety
    /// [`dma_map`](Self::dma_map) gave `first` for the same size and number, and no other thread
    /// unmaps it.
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
