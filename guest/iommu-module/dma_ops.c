// SPDX-License-Identifier: GPL-2.0
/*
 * DMA operations of endpoints.
 *
 * map:   a cached or shared mapping (exi_get), else addresses, a MAP request, polling.
 * unmap: the policy decides (exi_put); what is to be removed goes to exi_unmap_list().
 *
 * Nothing here sleeps except the page allocation of coherent memory. There are no sync operations
 * (DMA is coherent and nothing is bounced), no mmap and no get_sgtable: callers get -ENXIO.
 * A mapping covers whole pages; what else is in the first and last page is exposed with them.
 */
#include <linux/gfp.h>

#include "exitless-iommu.h"

static struct exi_ep *to_ep(struct device *dev)
{
	return container_of(dev->dma_ops, struct exi_ep, ops);
}

static u8 prot_of(enum dma_data_direction dir)
{
	switch (dir) {
	case DMA_TO_DEVICE:
		return VIRTIO_IOMMU_MAP_F_READ;
	case DMA_FROM_DEVICE:
		return VIRTIO_IOMMU_MAP_F_WRITE;
	default:
		return VIRTIO_IOMMU_MAP_F_READ | VIRTIO_IOMMU_MAP_F_WRITE;
	}
}

/* Last page whose every byte the device can address; 0 if there is none. */
static unsigned long last_pfn(struct exi_ep *ep, u64 mask)
{
	u64 last = min(mask, ep->iommu->iova_last);

	if (ep->dev->bus_dma_limit)
		last = min(last, ep->dev->bus_dma_limit);
	return (last + 1) >> PAGE_SHIFT ? ((last + 1) >> PAGE_SHIFT) - 1 : 0;
}

static dma_addr_t map_addr(const struct exi_map *map, phys_addr_t phys)
{
	return ((dma_addr_t)map->iova << PAGE_SHIFT) + offset_in_page(phys);
}

static void count_failures(struct exi_ep *ep, unsigned int n)
{
	unsigned long flags;

	spin_lock_irqsave(&ep->lock, flags);
	ep->st.map_failures += n;
	spin_unlock_irqrestore(&ep->lock, flags);
}

/* Some of a batch failed: removes those that succeeded. Overdue ones are not on it any more. */
static void undo_batch(struct exi_ep *ep, struct exi_batch *batch)
{
	struct exi_map *map, *next;
	LIST_HEAD(dead);

	list_for_each_entry_safe(map, next, &batch->maps, link) {
		if (map->state == EXI_MAP_MAPPED) {
			list_move_tail(&map->link, &dead);
		} else {
			list_del(&map->link);
			exi_map_free(map);
		}
	}
	exi_unmap_list(ep, &dead, false);
}

/* Queues the MAP of new addresses for a range. Returns the address, or DMA_MAPPING_ERROR. */
static dma_addr_t queue_new(struct exi_ep *ep, phys_addr_t phys, size_t size, u8 prot,
			    unsigned long last, struct exi_batch *batch)
{
	struct exi_map *map;
	dma_addr_t addr;

	if (!ep->attached || !last)
		return DMA_MAPPING_ERROR;
	map = exi_map_alloc(ep, phys, size, prot, last);
	if (!map)
		return DMA_MAPPING_ERROR;
	addr = map_addr(map, phys);
	if (exi_queue_map(map, batch)) {
		exi_map_free(map);
		return DMA_MAPPING_ERROR;
	}
	return addr;
}

static dma_addr_t map_range(struct device *dev, phys_addr_t phys, size_t size, u8 prot, u64 mask,
			    bool reusable)
{
	struct exi_ep *ep = to_ep(dev);
	unsigned long last = last_pfn(ep, mask);
	struct exi_batch batch;
	struct exi_map *map;
	dma_addr_t addr;

	if (size > EXI_IOVA_LAST)	/* page counts below cannot overflow */
		return DMA_MAPPING_ERROR;
	map = exi_get(ep, phys, size, prot, reusable ? last : 0);
	if (map)
		return map_addr(map, phys);
	exi_batch_init(&batch);
	addr = queue_new(ep, phys, size, prot, last, &batch);
	if (addr == DMA_MAPPING_ERROR || exi_wait(ep->iommu, &batch)) {
		undo_batch(ep, &batch);
		count_failures(ep, 1);
		return DMA_MAPPING_ERROR;
	}
	exi_insert(ep, &batch.maps, reusable);
	return addr;
}

static void unmap_range(struct device *dev, dma_addr_t addr, bool keep)
{
	struct exi_ep *ep = to_ep(dev);
	unsigned long flags;
	LIST_HEAD(dead);

	spin_lock_irqsave(&ep->lock, flags);
	exi_put(ep, addr, keep, &dead);
	spin_unlock_irqrestore(&ep->lock, flags);
	exi_unmap_list(ep, &dead, keep && exi_policy() == EXI_REUSE_ASYNC);
}

/* Memory-mapped I/O of another device: only with the flag that says so (5.13.6.5). */
static dma_addr_t map_mmio(struct device *dev, phys_addr_t phys, size_t size,
			   enum dma_data_direction dir)
{
	if (!to_ep(dev)->iommu->has_mmio)
		return DMA_MAPPING_ERROR;
	return map_range(dev, phys, size, prot_of(dir) | VIRTIO_IOMMU_MAP_F_MMIO,
			 dma_get_mask(dev), false);
}

#ifdef EXI_MAP_PHYS
static dma_addr_t exi_map_phys(struct device *dev, phys_addr_t phys, size_t size,
			       enum dma_data_direction dir, unsigned long attrs)
{
	if (attrs & DMA_ATTR_MMIO)
		return map_mmio(dev, phys, size, dir);
	return map_range(dev, phys, size, prot_of(dir), dma_get_mask(dev), true);
}

static void exi_unmap_phys(struct device *dev, dma_addr_t addr, size_t size,
			   enum dma_data_direction dir, unsigned long attrs)
{
	unmap_range(dev, addr, true);
}
#else
static dma_addr_t exi_map_page(struct device *dev, struct page *page, unsigned long offset,
			       size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	return map_range(dev, page_to_phys(page) + offset, size, prot_of(dir), dma_get_mask(dev),
			 true);
}

static void exi_unmap_page(struct device *dev, dma_addr_t addr, size_t size,
			   enum dma_data_direction dir, unsigned long attrs)
{
	unmap_range(dev, addr, true);
}

static dma_addr_t exi_map_resource(struct device *dev, phys_addr_t phys, size_t size,
				   enum dma_data_direction dir, unsigned long attrs)
{
	return map_mmio(dev, phys, size, dir);
}

static void exi_unmap_resource(struct device *dev, dma_addr_t addr, size_t size,
			       enum dma_data_direction dir, unsigned long attrs)
{
	unmap_range(dev, addr, false);
}
#endif

static void put_sg(struct exi_ep *ep, struct scatterlist *sgl, int nents, bool keep)
{
	struct scatterlist *sg;
	unsigned long flags;
	LIST_HEAD(dead);
	int i;

	spin_lock_irqsave(&ep->lock, flags);
	for_each_sg(sgl, sg, nents, i)
		if (sg_dma_len(sg))
			exi_put(ep, sg_dma_address(sg), keep, &dead);
	spin_unlock_irqrestore(&ep->lock, flags);
	exi_unmap_list(ep, &dead, keep && exi_policy() == EXI_REUSE_ASYNC);
}

/* Maps each entry by itself and notifies the device once for all of them. */
static int exi_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
		      enum dma_data_direction dir, unsigned long attrs)
{
	struct exi_ep *ep = to_ep(dev);
	unsigned long last = last_pfn(ep, dma_get_mask(dev));
	u8 prot = prot_of(dir);
	struct exi_batch batch;
	struct scatterlist *sg;
	unsigned int requested = 0;
	struct exi_map *map;
	int i, n;

	exi_batch_init(&batch);
	for_each_sg(sgl, sg, nents, n) {
		map = exi_get(ep, sg_phys(sg), sg->length, prot, last);
		if (map) {
			sg_dma_address(sg) = map_addr(map, sg_phys(sg));
			sg_dma_len(sg) = sg->length;
			continue;
		}
		requested++;
		sg_dma_address(sg) = queue_new(ep, sg_phys(sg), sg->length, prot, last, &batch);
		sg_dma_len(sg) = 0;	/* until its request succeeded */
		if (sg_dma_address(sg) == DMA_MAPPING_ERROR)
			break;
	}
	if (exi_wait(ep->iommu, &batch) || n < nents) {
		undo_batch(ep, &batch);
		put_sg(ep, sgl, n, true);	/* those with a length: found, not requested */
		count_failures(ep, requested);
		return -EIO;
	}
	exi_insert(ep, &batch.maps, true);
	for_each_sg(sgl, sg, nents, i)
		sg_dma_len(sg) = sg->length;
	return nents;
}

static void exi_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
			 enum dma_data_direction dir, unsigned long attrs)
{
	put_sg(to_ep(dev), sgl, nents, true);
}

/* Coherent memory is never reused: its pages go back to the allocator when it is freed. */
static struct page *exi_alloc_pages(struct device *dev, size_t size, dma_addr_t *addr,
				    enum dma_data_direction dir, gfp_t gfp)
{
	struct page *page;

	gfp &= ~(__GFP_DMA | __GFP_DMA32 | __GFP_HIGHMEM | __GFP_COMP);
	page = alloc_pages_node(dev_to_node(dev), gfp | __GFP_ZERO, get_order(size));
	if (!page)
		return NULL;
	*addr = map_range(dev, page_to_phys(page), PAGE_ALIGN(size), prot_of(dir),
			  dev->coherent_dma_mask, false);
	if (*addr != DMA_MAPPING_ERROR)
		return page;
	__free_pages(page, get_order(size));
	return NULL;
}

/*
 * The pages are freed even if the removal is overdue: the interface cannot say no. Until the
 * device confirms, it could still access them; README.md says so.
 */
static void exi_free_pages(struct device *dev, size_t size, struct page *page, dma_addr_t addr,
			   enum dma_data_direction dir)
{
	unmap_range(dev, addr, false);
	__free_pages(page, get_order(size));
}

static void *exi_alloc(struct device *dev, size_t size, dma_addr_t *addr, gfp_t gfp,
		       unsigned long attrs)
{
	struct page *page = exi_alloc_pages(dev, size, addr, DMA_BIDIRECTIONAL, gfp);

	return page ? page_address(page) : NULL;
}

static void exi_free(struct device *dev, size_t size, void *va, dma_addr_t addr,
		     unsigned long attrs)
{
	exi_free_pages(dev, size, virt_to_page(va), addr, DMA_BIDIRECTIONAL);
}

static int exi_dma_supported(struct device *dev, u64 mask)
{
	return last_pfn(to_ep(dev), mask) > PFN_UP(to_ep(dev)->iommu->iova_first);
}

static u64 exi_get_required_mask(struct device *dev)
{
	return DMA_BIT_MASK(fls64(to_ep(dev)->iommu->iova_last));
}

const struct dma_map_ops exi_dma_ops = {
	.alloc = exi_alloc,
	.free = exi_free,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
	.alloc_pages_op = exi_alloc_pages,
#else
	.alloc_pages = exi_alloc_pages,
#endif
	.free_pages = exi_free_pages,
#ifdef EXI_MAP_PHYS
	.map_phys = exi_map_phys,
	.unmap_phys = exi_unmap_phys,
#else
	.map_page = exi_map_page,
	.unmap_page = exi_unmap_page,
	.map_resource = exi_map_resource,
	.unmap_resource = exi_unmap_resource,
#endif
	.map_sg = exi_map_sg,
	.unmap_sg = exi_unmap_sg,
	.dma_supported = exi_dma_supported,
	.get_required_mask = exi_get_required_mask,
};

/* Operations of a function for which no endpoint could be created: nothing can be mapped. */
static int refuse_dma_supported(struct device *dev, u64 mask)
{
	return 0;
}

static void *refuse_alloc(struct device *dev, size_t size, dma_addr_t *addr, gfp_t gfp,
			  unsigned long attrs)
{
	return NULL;
}

static int refuse_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
			 enum dma_data_direction dir, unsigned long attrs)
{
	return -EIO;
}

#ifdef EXI_MAP_PHYS
static dma_addr_t refuse_map_phys(struct device *dev, phys_addr_t phys, size_t size,
				  enum dma_data_direction dir, unsigned long attrs)
{
	return DMA_MAPPING_ERROR;
}
#else
static dma_addr_t refuse_map_page(struct device *dev, struct page *page, unsigned long offset,
				  size_t size, enum dma_data_direction dir, unsigned long attrs)
{
	return DMA_MAPPING_ERROR;
}
#endif

const struct dma_map_ops exi_refuse_ops = {
	.alloc = refuse_alloc,
#ifdef EXI_MAP_PHYS
	.map_phys = refuse_map_phys,
#else
	.map_page = refuse_map_page,
#endif
	.map_sg = refuse_map_sg,
	.dma_supported = refuse_dma_supported,
};
