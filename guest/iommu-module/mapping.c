// SPDX-License-Identifier: GPL-2.0
/*
 * Mappings of one endpoint: I/O virtual addresses and the two tables that find them.
 *
 * by_iova finds a mapping when the driver unmaps its address, by_key when the driver maps the
 * same pages again with the same permissions. Addresses come from the kernel's IOVA allocator
 * with its per-CPU caches and go back only when the device confirmed the removal.
 */
#include <linux/hash.h>
#include <linux/list_sort.h>
#include <linux/slab.h>

#include "exitless-iommu.h"

/* The allocator caches sizes that are powers of two, up to this. */
#define EXI_SPAN_CACHED 32

struct kmem_cache *exi_map_cache;

static u64 map_key(unsigned long pfn, u32 pages, u8 prot)
{
	return pfn * GOLDEN_RATIO_64 + pages * 8 + prot;
}

/* Allocates a mapping with addresses whose last page is at most last_pfn. Nothing is sent. */
struct exi_map *exi_map_alloc(struct exi_ep *ep, phys_addr_t phys, size_t size, u8 prot,
			      unsigned long last_pfn)
{
	u64 pages = PFN_UP((u64)offset_in_page(phys) + size);
	struct exi_map *map;

	if (!size || pages > U32_MAX / 2)
		return NULL;
	map = kmem_cache_zalloc(exi_map_cache, GFP_ATOMIC | __GFP_NOWARN);
	if (!map)
		return NULL;
	map->ep = ep;
	map->pfn = PHYS_PFN(phys);
	map->pages = pages;
	map->span = pages < EXI_SPAN_CACHED ? roundup_pow_of_two(pages) : pages;
	map->prot = prot;
	map->users = 1;
	INIT_LIST_HEAD(&map->link);
	INIT_LIST_HEAD(&map->cycle);
	map->iova = alloc_iova_fast(&ep->iovad, map->span, last_pfn, true);
	if (!map->iova) {
		kmem_cache_free(exi_map_cache, map);
		return NULL;
	}
	atomic_inc(&ep->nmaps);
	return map;
}

/* Frees a mapping that the device does not have. With vq_lock held if it was quarantined. */
void exi_map_free(struct exi_map *map)
{
	struct exi_ep *ep = map->ep;

	if (map->quarantined)
		ep->iommu->st.quarantined--;
	free_iova_fast(&ep->iovad, map->iova, map->span);
	kmem_cache_free(exi_map_cache, map);
	/* Last: the endpoint may be freed once it has no mappings. */
	atomic_dec(&ep->nmaps);
}

static void count_live(struct exi_ep *ep)
{
	ep->st.live++;
	ep->st.live_max = max(ep->st.live_max, ep->st.live);
	exi_count_up(&ep->iommu->live, &ep->iommu->live_max);
}

static void uncount_live(struct exi_ep *ep, u32 users)
{
	ep->st.live -= users;
	atomic_long_sub(users, &ep->iommu->live);
}

/*
 * Takes a further use of an existing mapping, or returns NULL. The mask of the device may have
 * shrunk since the mapping was made, so its addresses are checked again.
 */
struct exi_map *exi_get(struct exi_ep *ep, phys_addr_t phys, size_t size, u8 prot,
			unsigned long last_pfn)
{
	u64 pages = PFN_UP((u64)offset_in_page(phys) + size);
	unsigned long pfn = PHYS_PFN(phys), flags;
	enum exi_reuse policy = exi_policy();
	struct exi_map *map;

	spin_lock_irqsave(&ep->lock, flags);
	ep->st.maps++;
	if (policy == EXI_REUSE_NONE || policy == EXI_REUSE_ASYNC)
		goto miss;
	hash_for_each_possible(ep->by_key, map, by_key, map_key(pfn, pages, prot)) {
		if (map->pfn != pfn || map->pages != pages || map->prot != prot ||
		    map->iova + map->pages - 1 > last_pfn || !exi_may_match(map, policy))
			continue;
		if (map->users)
			ep->st.shared++;
		else
			ep->st.hits++;
		exi_match(ep, map);
		map->users++;
		count_live(ep);
		spin_unlock_irqrestore(&ep->lock, flags);
		return map;
	}
miss:
	ep->st.misses++;
	spin_unlock_irqrestore(&ep->lock, flags);
	return NULL;
}

/* Enters mappings that the device confirmed. Until then no other CPU can find them. */
void exi_insert(struct exi_ep *ep, struct list_head *maps, bool reusable)
{
	enum exi_reuse policy = exi_policy();
	struct exi_map *map, *next;
	unsigned long flags;

	reusable = reusable && policy != EXI_REUSE_NONE && policy != EXI_REUSE_ASYNC;
	spin_lock_irqsave(&ep->lock, flags);
	list_for_each_entry_safe(map, next, maps, link) {
		list_del_init(&map->link);
		hash_add(ep->by_iova, &map->by_iova, map->iova);
		if (reusable)
			hash_add(ep->by_key, &map->by_key,
				 map_key(map->pfn, map->pages, map->prot));
		count_live(ep);
	}
	spin_unlock_irqrestore(&ep->lock, flags);
}

/*
 * Undoes one dma_map call. If the mapping is to be removed it is moved to dead, which the caller
 * passes to exi_unmap_list() after unlocking. Called with ep->lock held.
 */
void exi_put(struct exi_ep *ep, dma_addr_t addr, bool keep, struct list_head *dead)
{
	struct exi_map *map;

	ep->st.unmaps++;
	hash_for_each_possible(ep->by_iova, map, by_iova, addr >> PAGE_SHIFT) {
		if (map->iova != addr >> PAGE_SHIFT)
			continue;
		if (!map->users)
			break;
		uncount_live(ep, 1);
		if (!--map->users)
			exi_release(ep, map, keep, dead);
		return;
	}
	/* The driver's error, or memory freed after a probe that failed and was cleaned up. */
	ep->st.unknown_unmaps++;
	dev_warn_ratelimited(ep->dev, "unmap of %pad, which is not mapped\n", &addr);
}

/* Takes a mapping out of the tables and onto dead. Called with ep->lock held. */
void exi_unlink(struct exi_ep *ep, struct exi_map *map, struct list_head *dead)
{
	u64 age;

	hash_del(&map->by_key);
	hash_del(&map->by_iova);
	list_del_init(&map->cycle);
	if (map->stale) {
		map->stale = false;
		ep->nstale--;
		ep->st.stale--;
		atomic_long_dec(&ep->iommu->stale);
		age = jiffies_to_msecs(jiffies - map->released);
		ep->st.stale_age_max_ms = max(ep->st.stale_age_max_ms, age);
	}
	uncount_live(ep, map->users);
	map->users = 0;
	list_move_tail(&map->link, dead);
}

static int compare_iova(void *priv, const struct list_head *a, const struct list_head *b)
{
	return list_entry(a, struct exi_map, link)->iova >
	       list_entry(b, struct exi_map, link)->iova;
}

/*
 * Removes mappings from the device and frees them once it confirmed; waits for that unless async.
 * Mappings whose address ranges follow each other share one UNMAP (5.13.6.6: a request may cover
 * several whole mappings, and unmapped addresses between them). Called without locks.
 */
void exi_unmap_list(struct exi_ep *ep, struct list_head *dead, bool async)
{
	struct exi_iommu *iommu = ep->iommu;
	struct exi_batch batch;
	struct exi_map *map;
	LIST_HEAD(run);

	if (list_empty(dead))
		return;
	exi_batch_init(&batch);
	if (!list_is_singular(dead))
		list_sort(NULL, dead, compare_iova);
	while (!list_empty(dead)) {
		unsigned long next = 0;
		unsigned int n = 0;

		while (!list_empty(dead) && n++ < EXI_RANGE_MAX) {
			map = list_first_entry(dead, struct exi_map, link);
			if (next && map->iova != next)
				break;
			next = map->iova + map->span;
			list_move_tail(&map->link, &run);
		}
		exi_queue_unmap(ep, &run, async ? NULL : &batch);
		INIT_LIST_HEAD(&run);
		if (async)
			exi_async_bound(iommu);
	}
	if (!async) {
		exi_wait(iommu, &batch);
		return;
	}
	if (READ_ONCE(iommu->unkicked) >= iommu->nslots / 8)
		exi_kick(iommu);
	if (!READ_ONCE(iommu->closing))
		queue_delayed_work(iommu->wq, &iommu->kick_work, 1);
}

/* Removes every mapping, used or not. Returns how many were in use. Called without locks. */
unsigned int exi_kill_all(struct exi_ep *ep)
{
	unsigned int used = 0, n;
	struct hlist_node *next;
	struct exi_map *map;
	unsigned long flags;
	LIST_HEAD(dead);
	int bucket;

	do {
		n = 0;
		spin_lock_irqsave(&ep->lock, flags);
		hash_for_each_safe(ep->by_iova, bucket, next, map, by_iova) {
			used += !!map->users;
			exi_unlink(ep, map, &dead);
			if (++n == EXI_RANGE_MAX)
				break;
		}
		spin_unlock_irqrestore(&ep->lock, flags);
		exi_unmap_list(ep, &dead, false);
		cond_resched();
	} while (n == EXI_RANGE_MAX);
	return used;
}
