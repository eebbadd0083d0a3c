/*
 * What Linux's IOVA allocator and IOMMU page tables need of a kernel, in user space, as little and as fast as it can be:
 * measured beside it, whatever is simpler here than in a kernel is in Linux's favour.
 *
 *   interrupts      are not disabled
 *   spinlocks       one compare-and-swap when free, else test and test-and-set
 *   per CPU         one arena a CPU; a thread says which CPU it is (`shim_set_cpu`)
 *   kmem_cache      free lists of each thread, 64 objects at a time from and to a shared one
 *   table pages     one arena with a list head for each page, as `struct page` has it; physical is virtual
 *   workqueues      never run: the depot's worker, which gives magazines back every 100 ms, costs nothing
 *   hotplug, leak detection, statistics: nothing
 *
 * Every header the kernel's files name, but the few taken from the kernel itself, is this file
 * (scripts/linux-iova.sh).
 */
#ifndef SHIM_H
#define SHIM_H

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Configuration. */
#define CONFIG_64BIT 1
#define CONFIG_SMP 1
#define CONFIG_IOMMU_IOVA 1
#define SHIM_SECOND(a, b, ...) b
#define SHIM_PICK(...) SHIM_SECOND(__VA_ARGS__)
#define SHIM_ON_1 ~, 1
#define SHIM_ON(value) SHIM_ON_##value
#define SHIM_ON_VALUE(value) SHIM_ON(value)
#define IS_ENABLED(option) SHIM_PICK(SHIM_ON_VALUE(option), 0, 0)
#define IS_REACHABLE(option) IS_ENABLED(option)
#define IS_BUILTIN(option) IS_ENABLED(option)

/* Types. */
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef u64 dma_addr_t;
typedef u64 phys_addr_t;
typedef unsigned int gfp_t;
typedef struct { int counter; } atomic_t;
struct list_head { struct list_head *next, *prev; };
struct hlist_node { struct hlist_node *next, **pprev; };
#define U32_MAX UINT32_MAX
#define U64_MAX UINT64_MAX
#ifndef ULLONG_MAX
#define ULLONG_MAX (~0ULL)
#endif
#define PAGE_SHIFT 12
#define PAGE_SIZE (1UL << PAGE_SHIFT)

/* Words of the compiler. */
#define __percpu
#define __init
#define __exit
#define __rcu
#define __force
#define __user
#define __must_check
#define __maybe_unused __attribute__((unused))
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))
#define noinline __attribute__((noinline))
#define __aligned(n) __attribute__((aligned(n)))
#define ____cacheline_aligned __aligned(64)
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define fallthrough __attribute__((fallthrough))
#undef static_assert
#define static_assert(x, ...) _Static_assert(x, "")
#define BUILD_BUG_ON(x) _Static_assert(!(x), "")
#define BUILD_BUG() do { } while (0)
#define EXPORT_SYMBOL(name)
#define EXPORT_SYMBOL_GPL(name)
#define EXPORT_SYMBOL_NS_GPL(name, ns)
#define MODULE_LICENSE(text)
#define MODULE_AUTHOR(text)
#define MODULE_DESCRIPTION(text)
#define MODULE_IMPORT_NS(ns)
#define SHIM_PASTE(a, b) a##b
#define CONCATENATE(a, b) SHIM_PASTE(a, b)
#define SHIM_TEXT(...) #__VA_ARGS__
#define __stringify(...) SHIM_TEXT(__VA_ARGS__)
#define SHIM_UNIQUE(name) CONCATENATE(shim_##name, __LINE__)

/* Arithmetic. */
#define BIT(n) (1UL << (n))
#define BIT_ULL(n) (1ULL << (n))
#define GENMASK(high, low) ((~0UL >> (63 - (high))) & (~0UL << (low)))
#define GENMASK_ULL(high, low) ((~0ULL >> (63 - (high))) & (~0ULL << (low)))
#define FIELD_PREP(mask, value) (((u64)(value) << __builtin_ctzll(mask)) & (u64)(mask))
#define FIELD_GET(mask, word) (((u64)(word) & (u64)(mask)) >> __builtin_ctzll(mask))
#define SHIM_COMPARE(a, op, b) ({ __auto_type a_ = (a); __auto_type b_ = (b); a_ op b_ ? a_ : b_; })
#define min(a, b) SHIM_COMPARE(a, <, b)
#define max(a, b) SHIM_COMPARE(a, >, b)
#define min_t(type, a, b) SHIM_COMPARE((type)(a), <, (type)(b))
#define max_t(type, a, b) SHIM_COMPARE((type)(a), >, (type)(b))
#define swap(a, b) do { typeof(a) swap_ = (a); (a) = (b); (b) = swap_; } while (0)
#define ALIGN(x, a) (((x) + (typeof(x))(a) - 1) & ~((typeof(x))(a) - 1))
#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define check_add_overflow(a, b, sum) __builtin_add_overflow(a, b, sum)
#define is_power_of_2(n) ((n) != 0 && ((n) & ((n) - 1)) == 0)
#define ilog2(n) (63 - __builtin_clzll((unsigned long long)(n)))
static inline unsigned int fls(unsigned int x) { return x ? 32 - __builtin_clz(x) : 0; }
static inline unsigned int fls64(u64 x) { return x ? 64 - __builtin_clzll(x) : 0; }
static inline unsigned int fls_long(unsigned long x) { return fls64(x); }
static inline unsigned long __ffs(unsigned long x) { return __builtin_ctzl(x); }
static inline unsigned int __ffs64(u64 x) { return __builtin_ctzll(x); }
static inline unsigned long ffz(unsigned long x) { return __builtin_ctzl(~x); }
static inline unsigned int order_base_2(unsigned long n) { return n > 1 ? fls64(n - 1) : 0; }
static inline unsigned long roundup_pow_of_two(unsigned long n) { return 1UL << order_base_2(n); }

/* Memory order. */
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, value) (*(volatile typeof(x) *)&(x) = (value))
#define smp_wmb() __atomic_thread_fence(__ATOMIC_RELEASE)
#define smp_rmb() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define smp_mb() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define dma_wmb() smp_wmb()
#define smp_load_acquire(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define smp_store_release(p, value) __atomic_store_n(p, value, __ATOMIC_RELEASE)
#define SHIM_TRY(p, old, value, order) __atomic_compare_exchange_n(p, old, value, 0, order, __ATOMIC_RELAXED)
#define try_cmpxchg64(p, old, value) SHIM_TRY(p, old, value, __ATOMIC_SEQ_CST)
#define try_cmpxchg64_release(p, old, value) SHIM_TRY(p, old, value, __ATOMIC_RELEASE)
#define try_cmpxchg_release(p, old, value) SHIM_TRY(p, old, value, __ATOMIC_RELEASE)
#define rcu_assign_pointer(p, value) smp_store_release(&(p), value)
#define rcu_dereference_raw(p) READ_ONCE(p)

/* Pointers and lists. */
#define container_of(p, type, member) ((type *)((char *)(p) - offsetof(type, member)))
#define container_of_const(p, type, member) container_of(p, type, member)
#define hlist_entry_safe(p, type, member) ({ typeof(p) p_ = (p); p_ ? container_of(p_, type, member) : NULL; })
#define memset_after(object, byte, member) ({ \
	size_t from_ = offsetof(typeof(*(object)), member) + sizeof((object)->member); \
	memset((char *)(object) + from_, byte, sizeof(*(object)) - from_); })
#define ERR_PTR(error) ((void *)(long)(error))
#define PTR_ERR(p) ((long)(p))
#define IS_ERR(p) ((unsigned long)(p) >= (unsigned long)-4095)
#define LIST_HEAD_INIT(name) { &(name), &(name) }
static inline void INIT_LIST_HEAD(struct list_head *head) { head->next = head->prev = head; }

/* What must not happen. */
void shim_broken(const char *file, int line);
#define WARN_ON(x) ({ bool x_ = !!(x); if (unlikely(x_)) shim_broken(__FILE__, __LINE__); x_; })
#define WARN_ON_ONCE(x) WARN_ON(x)
#define BUG_ON(x) ((void)WARN_ON(x))
#define pr_err(...) do { } while (0)
#define pr_warn(...) do { } while (0)
#define pr_info(...) do { } while (0)
#define pr_err_ratelimited(...) do { } while (0)

/* Locks. */
typedef struct { int held; } spinlock_t;
typedef spinlock_t raw_spinlock_t;
struct mutex { spinlock_t lock; };
#define DEFINE_MUTEX(name) struct mutex name
#define spin_lock_init(lock) ((lock)->held = 0)
static inline void spin_lock(spinlock_t *lock)
{
	int free = 0;

	while (!__atomic_compare_exchange_n(&lock->held, &free, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
		while (__atomic_load_n(&lock->held, __ATOMIC_RELAXED))
			__builtin_ia32_pause();
		free = 0;
	}
}
static inline void spin_unlock(spinlock_t *lock) { __atomic_store_n(&lock->held, 0, __ATOMIC_RELEASE); }
#define spin_lock_irqsave(lock, flags) do { (flags) = 0; spin_lock(lock); } while (0)
#define spin_unlock_irqrestore(lock, flags) do { (void)(flags); spin_unlock(lock); } while (0)
#define assert_spin_locked(lock) do { } while (0)
#define lockdep_assert_held(lock) do { } while (0)
#define mutex_lock(mutex) spin_lock(&(mutex)->lock)
#define mutex_unlock(mutex) spin_unlock(&(mutex)->lock)

/* CPUs. */
enum { SHIM_CPUS = 4, SHIM_ARENA = 1 << 26 };
extern __thread unsigned int shim_cpu __attribute__((tls_model("initial-exec")));
extern __thread unsigned long shim_offset __attribute__((tls_model("initial-exec")));
void *shim_alloc_percpu(size_t size);
void free_percpu(void *p);
#define __alloc_percpu(size, align) shim_alloc_percpu(size)
#define alloc_percpu(type) ((type *)shim_alloc_percpu(sizeof(type)))
#define per_cpu_ptr(p, cpu) ((typeof(p))((char *)(p) + (unsigned long)(cpu) * SHIM_ARENA))
#define raw_cpu_ptr(p) ((typeof(p))((char *)(p) + shim_offset))
#define this_cpu_ptr(p) raw_cpu_ptr(p)
#define smp_processor_id() shim_cpu
#define for_each_possible_cpu(cpu) for ((cpu) = 0; (cpu) < SHIM_CPUS; (cpu)++)
#define for_each_online_cpu(cpu) for_each_possible_cpu(cpu)
#define num_online_cpus() SHIM_CPUS
#define cache_line_size() 64
enum cpuhp_state { CPUHP_IOMMU_IOVA_DEAD };
#define cpuhp_setup_state_multi(...) 0
#define cpuhp_remove_multi_state(...) do { } while (0)
#define cpuhp_state_add_instance_nocalls(...) 0
#define cpuhp_state_remove_instance_nocalls(...) 0

/* Memory. */
enum { GFP_KERNEL = 1, GFP_ATOMIC = 2, __GFP_NOWARN = 4, __GFP_ZERO = 8, SLAB_HWCACHE_ALIGN = 1 };
struct kmem_cache;
struct kmem_cache *shim_cache(size_t size);
void *kmem_cache_alloc(struct kmem_cache *cache, gfp_t flags);
void *kmem_cache_zalloc(struct kmem_cache *cache, gfp_t flags);
void kmem_cache_free(struct kmem_cache *cache, void *object);
#define kmem_cache_create(name, size, align, flags, made) shim_cache(size)
#define kmem_cache_destroy(cache) do { (void)(cache); } while (0)
void *shim_zalloc(size_t size);
void kfree(void *p);
#define kzalloc(size, flags) shim_zalloc(size)
#define kmalloc(size, flags) shim_zalloc(size)
#define kcalloc(n, size, flags) shim_zalloc((size_t)(n) * (size))
#define kzalloc_obj(object, ...) ((typeof(object) *)shim_zalloc(sizeof(object)))
#define kzalloc_objs(object, n, ...) ((typeof(object) *)shim_zalloc(sizeof(object) * (n)))
#define kmemleak_no_scan(p) do { } while (0)
#define kmemleak_transient_leak(p) do { } while (0)

/* Work that is put off: never done. */
struct work_struct { int unused; };
struct delayed_work { struct work_struct work; };
#define to_delayed_work(of) container_of(of, struct delayed_work, work)
#define INIT_DELAYED_WORK(work, function) ((void)(work), (void)(function))
#define schedule_delayed_work(work, delay) ((void)(work))
#define mod_delayed_work(queue, work, delay) ((void)(work))
#define cancel_delayed_work_sync(work) ((void)(work))
#define system_wq NULL
#define msecs_to_jiffies(ms) (ms)

/* Pages of tables. */
struct device;
struct iommu_pages_list { struct list_head pages; };
#define IOMMU_PAGES_LIST_INIT(name) ((struct iommu_pages_list){ .pages = LIST_HEAD_INIT((name).pages) })
void *shim_page(void);
void iommu_free_pages(void *page);
void iommu_pages_list_add(struct iommu_pages_list *list, void *page);
void iommu_put_pages_list(struct iommu_pages_list *list);
void iommu_pages_list_splice(struct iommu_pages_list *from, struct iommu_pages_list *to);
static inline bool iommu_pages_list_empty(struct iommu_pages_list *list) { return list->pages.next == &list->pages; }
#define iommu_alloc_pages_node_sz(node, flags, size) shim_page()
#define iommu_pages_start_incoherent(page, device) 0
#define iommu_pages_start_incoherent_list(list, device) 0
#define iommu_pages_stop_incoherent_list(list, device) do { } while (0)
#define iommu_pages_free_incoherent(page, device) iommu_free_pages(page)
#define iommu_pages_flush_incoherent(...) do { } while (0)
#define virt_to_phys(p) ((phys_addr_t)(uintptr_t)(p))
#define __va(phys) ((void *)(uintptr_t)(phys))

/* Domains. The gather is what an unmap leaves to be invalidated; here its tables are freed at once. */
enum { IOMMU_READ = 1, IOMMU_WRITE = 2, IOMMU_CACHE = 4, IOMMU_NOEXEC = 8, IOMMU_MMIO = 16, IOMMU_DIRTY_NO_CLEAR = 1, __IOMMU_DOMAIN_PAGING = 1 };
struct iommu_domain {
	unsigned int type;
	bool is_iommupt;
	unsigned long pgsize_bitmap;
	struct { dma_addr_t aperture_start, aperture_end; bool force_aperture; } geometry;
};
struct iommu_iotlb_gather {
	unsigned long start, end;
	size_t pgsize;
	struct iommu_pages_list freelist;
	bool queued;
	struct { u8 leaf_levels_bitmap, table_levels_bitmap; } pt;
};
#define iommu_iotlb_gather_queued(gather) ((gather) && (gather)->queued)
struct iova_bitmap;
struct iommu_dirty_bitmap { struct iova_bitmap *bitmap; struct iommu_iotlb_gather *gather; };
#define iova_bitmap_set(bitmap, iova, length) do { } while (0)
static inline void iommu_iotlb_gather_init(struct iommu_iotlb_gather *gather)
{
	*gather = (struct iommu_iotlb_gather){ .start = ULONG_MAX, .freelist = IOMMU_PAGES_LIST_INIT(gather->freelist) };
}
static inline void iommu_iotlb_gather_add_range(struct iommu_iotlb_gather *gather, unsigned long iova, size_t size)
{
	gather->start = min(gather->start, iova);
	gather->end = max(gather->end, iova + size - 1);
}
static inline bool iommu_iotlb_gather_is_disjoint(struct iommu_iotlb_gather *gather, unsigned long iova, size_t size)
{
	return gather->end && (iova + size < gather->start || iova > gather->end + 1);
}
static inline void iommu_iotlb_sync(struct iommu_domain *domain, struct iommu_iotlb_gather *gather)
{
	(void)domain;
	iommu_put_pages_list(&gather->freelist);
	iommu_iotlb_gather_init(gather);
}

#endif
