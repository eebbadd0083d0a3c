/*
 * The memory behind the shim, and the few functions that a measuring program calls: a domain is an IOVA space and a page
 * table of VT-d's second stage, mapped and unmapped as the kernel's DMA API does it (allocate, map; unmap, invalidate,
 * free), without hardware. `alloc_iova_fast` and `free_iova_fast` are the kernel's own, exported as they are.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <linux/iova.h>
#include <linux/generic_pt/iommu.h>

__thread unsigned int shim_cpu;
__thread unsigned long shim_offset;
static long bytes; /* in use, but for objects of caches, which each thread counts for itself */

void shim_broken(const char *file, int line)
{
	fprintf(stderr, "linux-iova: a warning of the kernel: %s:%d\n", file, line);
	abort();
}

static void count(long more) { __atomic_fetch_add(&bytes, more, __ATOMIC_RELAXED); }

void *shim_zalloc(size_t size)
{
	size_t *p = aligned_alloc(64, ALIGN(size + 64, (size_t)64));

	memset(p, 0, size + 64);
	*p = size;
	count(size);
	return p + 8;
}

void kfree(void *p)
{
	if (!p)
		return;
	count(-(long)((size_t *)p)[-8]);
	free((size_t *)p - 8);
}

/* Per CPU: the same offset in the arena of each; blocks that are free are linked by size in cache lines. */
static char *arenas;
static size_t arena_used;
static void *arena_free[64];
static spinlock_t arena_lock;

static void *reserve(size_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

void *shim_alloc_percpu(size_t size)
{
	size_t lines = (size + 64 + 63) / 64;
	char *p = NULL;

	spin_lock(&arena_lock);
	if (!arenas)
		arenas = reserve((size_t)SHIM_CPUS * SHIM_ARENA);
	if (lines < 64 && arena_free[lines]) {
		p = arena_free[lines];
		arena_free[lines] = *(void **)p;
	} else if (arenas && arena_used + lines * 64 <= SHIM_ARENA) {
		p = arenas + arena_used;
		arena_used += lines * 64;
	}
	spin_unlock(&arena_lock);
	if (!p)
		return NULL;
	for (int cpu = 0; cpu < SHIM_CPUS; cpu++)
		memset(per_cpu_ptr(p, cpu), 0, lines * 64);
	*(size_t *)p = lines;
	count(SHIM_CPUS * size);
	return p + 64;
}

void free_percpu(void *p)
{
	char *block = (char *)p - 64;
	size_t lines = *(size_t *)block;

	count(-(long)(SHIM_CPUS * (lines - 1) * 64));
	spin_lock(&arena_lock);
	if (lines < 64) {
		*(void **)block = arena_free[lines];
		arena_free[lines] = block;
	}
	spin_unlock(&arena_lock);
}

/* Caches of objects. */
enum { CACHES = 8, BATCH = 64 };
struct kmem_cache { size_t size; spinlock_t lock; void *free; };
static struct kmem_cache caches[CACHES];
static struct mine { void *free; unsigned int count; long used; } __thread mine[CACHES] __attribute__((tls_model("initial-exec")));

struct kmem_cache *shim_cache(size_t size)
{
	static int used;

	size = ALIGN(size, (size_t)64);
	for (int at = 0; at < used; at++)
		if (caches[at].size == size)
			return &caches[at];
	caches[used].size = size;
	return &caches[used++];
}

static noinline void refill(struct kmem_cache *cache, struct mine *my)
{
	spin_lock(&cache->lock);
	for (; my->count < BATCH && cache->free; my->count++) {
		void **object = cache->free;

		cache->free = *object;
		*object = my->free;
		my->free = object;
	}
	spin_unlock(&cache->lock);
	if (my->count)
		return;
	char *slab = aligned_alloc(64, BATCH * cache->size);

	for (; my->count < BATCH; my->count++) {
		void **object = (void **)(slab + my->count * cache->size);

		*object = my->free;
		my->free = object;
	}
}

static noinline void drain(struct kmem_cache *cache, struct mine *my)
{
	spin_lock(&cache->lock);
	for (; my->count > BATCH; my->count--) {
		void **object = my->free;

		my->free = *object;
		*object = cache->free;
		cache->free = object;
	}
	spin_unlock(&cache->lock);
}

void *kmem_cache_alloc(struct kmem_cache *cache, gfp_t flags)
{
	struct mine *my = &mine[cache - caches];
	void **object;

	(void)flags;
	if (!my->count)
		refill(cache, my);
	object = my->free;
	my->free = *object;
	my->count--;
	my->used++;
	return object;
}

void *kmem_cache_zalloc(struct kmem_cache *cache, gfp_t flags)
{
	return memset(kmem_cache_alloc(cache, flags), 0, cache->size);
}

void kmem_cache_free(struct kmem_cache *cache, void *object)
{
	struct mine *my = &mine[cache - caches];

	*(void **)object = my->free;
	my->free = object;
	my->used--;
	if (++my->count >= 2 * BATCH)
		drain(cache, my);
}

/* Table pages, and a list head beside each. */
enum { PAGES = 1 << 20 };
static char *pages;
static struct list_head *heads;
static size_t pages_used;
static void *pages_free;
static spinlock_t pages_lock;

void *shim_page(void)
{
	void *page = NULL;

	spin_lock(&pages_lock);
	if (!pages) {
		pages = reserve((size_t)PAGES * PAGE_SIZE);
		heads = reserve((size_t)PAGES * sizeof(*heads));
	}
	if (pages_free) {
		page = pages_free;
		pages_free = *(void **)page;
	} else if (pages && heads && pages_used < PAGES) {
		page = pages + pages_used++ * PAGE_SIZE;
	}
	spin_unlock(&pages_lock);
	if (!page)
		return ERR_PTR(-ENOMEM);
	count(PAGE_SIZE);
	return memset(page, 0, PAGE_SIZE);
}

void iommu_free_pages(void *page)
{
	if (!page)
		return;
	count(-(long)PAGE_SIZE);
	spin_lock(&pages_lock);
	*(void **)page = pages_free;
	pages_free = page;
	spin_unlock(&pages_lock);
}

static struct list_head *head_of(void *page) { return &heads[((char *)page - pages) / PAGE_SIZE]; }

static void link_between(struct list_head *entry, struct list_head *before, struct list_head *after)
{
	entry->prev = before;
	entry->next = after;
	before->next = entry;
	after->prev = entry;
}

void iommu_pages_list_add(struct iommu_pages_list *list, void *page)
{
	link_between(head_of(page), list->pages.prev, &list->pages);
}

void iommu_pages_list_splice(struct iommu_pages_list *from, struct iommu_pages_list *to)
{
	if (iommu_pages_list_empty(from))
		return;
	from->pages.next->prev = to->pages.prev;
	to->pages.prev->next = from->pages.next;
	from->pages.prev->next = &to->pages;
	to->pages.prev = from->pages.prev;
}

void iommu_put_pages_list(struct iommu_pages_list *list)
{
	for (struct list_head *at = list->pages.next, *next; at != &list->pages; at = next) {
		next = at->next;
		iommu_free_pages(pages + (at - heads) * PAGE_SIZE);
	}
	*list = IOMMU_PAGES_LIST_INIT(*list);
}

/* What is called from outside. */
struct shim_domain {
	struct iova_domain space; /* the first member: a domain is its space too */
	union {
		struct iommu_domain domain;
		struct pt_iommu_vtdss table;
	};
};

const char *shim_version(void) { return LINUX_VERSION; }

/* In use by all domains, as the difference of two calls between which no other thread works. */
long shim_bytes(void)
{
	long sum = __atomic_load_n(&bytes, __ATOMIC_RELAXED);

	for (int at = 0; at < CACHES; at++)
		sum += mine[at].used * (long)caches[at].size;
	return sum;
}

/* Of this thread, before it does anything else; a CPU is one thread's. */
void shim_set_cpu(unsigned int cpu)
{
	shim_cpu = cpu;
	shim_offset = (unsigned long)cpu * SHIM_ARENA;
}

struct shim_domain *shim_domain_new(unsigned long first_pfn)
{
	const struct pt_iommu_vtdss_cfg cfg = {
		.common = { .features = BIT(PT_FEAT_FLUSH_RANGE), .hw_max_vasz_lg2 = 48, .hw_max_oasz_lg2 = 52 },
		.top_level = 3,
	};
	struct shim_domain *domain = shim_zalloc(sizeof(*domain));

	if (iova_cache_get())
		return NULL;
	init_iova_domain(&domain->space, PAGE_SIZE, first_pfn);
	if (iova_domain_init_rcaches(&domain->space) || pt_iommu_vtdss_init(&domain->table, &cfg, GFP_KERNEL))
		return NULL;
	return domain;
}

void shim_domain_free(struct shim_domain *domain)
{
	pt_iommu_deinit(&domain->table.iommu);
	put_iova_domain(&domain->space);
	iova_cache_put();
	kfree(domain);
}

int shim_map(struct shim_domain *domain, unsigned long iova, phys_addr_t phys, size_t page_size, size_t n)
{
	size_t mapped = 0;

#ifdef HAS_MAP_RANGE /* what map_pages became in 7.x */
	return domain->table.iommu.ops->map_range(&domain->table.iommu, iova, phys, page_size * n, IOMMU_READ | IOMMU_WRITE,
						  GFP_ATOMIC, &mapped);
#else
	return pt_iommu_vtdss_map_pages(&domain->domain, iova, phys, page_size, n, IOMMU_READ | IOMMU_WRITE, GFP_ATOMIC, &mapped);
#endif
}

size_t shim_unmap(struct shim_domain *domain, unsigned long iova, size_t page_size, size_t n)
{
	struct iommu_iotlb_gather gather;
	size_t unmapped;

	iommu_iotlb_gather_init(&gather);
#ifdef HAS_MAP_RANGE
	unmapped = domain->table.iommu.ops->unmap_range(&domain->table.iommu, iova, page_size * n, &gather);
#else
	unmapped = pt_iommu_vtdss_unmap_pages(&domain->domain, iova, page_size, n, &gather);
#endif
	iommu_iotlb_sync(&domain->domain, &gather);
	return unmapped;
}

/* Of `n` pages of `page_size` at `phys`: the first page's number, 0 where there is none. */
unsigned long shim_dma_map(struct shim_domain *domain, phys_addr_t phys, size_t page_size, size_t n, unsigned long limit_pfn)
{
	unsigned long pages = n * (page_size >> PAGE_SHIFT);
	unsigned long pfn = alloc_iova_fast(&domain->space, pages, limit_pfn, true);

	if (pfn && shim_map(domain, pfn << PAGE_SHIFT, phys, page_size, n)) {
		free_iova_fast(&domain->space, pfn, pages);
		pfn = 0;
	}
	return pfn;
}

/* Strict: nothing is free before it is unmapped and the device has forgotten it. */
void shim_dma_unmap(struct shim_domain *domain, unsigned long pfn, size_t page_size, size_t n)
{
	shim_unmap(domain, pfn << PAGE_SHIFT, page_size, n);
	free_iova_fast(&domain->space, pfn, n * (page_size >> PAGE_SHIFT));
}
