// SPDX-License-Identifier: GPL-2.0
/*
 * Test: a PCI driver for QEMU's edu device that only calls the DMA interface, and the scenarios.
 * Writing a scenario's name to the parameter "run" runs it: the write fails if the scenario does,
 * and the kernel log says where. Between scenarios the shell looks at the module's counters.
 */
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/pci.h>
#include <linux/random.h>
#include <linux/scatterlist.h>
#include <linux/string.h>
#include <linux/timer.h>

#include "exi-fake.h"

#define PAGES 64

static struct device *dev;
static struct page *pages[PAGES];
static dma_addr_t kept;		/* a mapping that lives from one scenario to the next */

#define REQUIRE(condition) do {							\
	if (!(condition)) {							\
		pr_err("exi-fake: line %d: %s\n", __LINE__, #condition);	\
		return -EIO;							\
	}									\
} while (0)

static dma_addr_t map(int page, enum dma_data_direction dir)
{
	dma_addr_t addr = dma_map_page(dev, pages[page], 0, PAGE_SIZE, dir);

	return dma_mapping_error(dev, addr) ? DMA_MAPPING_ERROR : addr;
}

static void unmap(dma_addr_t addr, enum dma_data_direction dir)
{
	dma_unmap_page(dev, addr, PAGE_SIZE, dir);
}

/* The device would reach exactly this page, with exactly these permissions. */
static bool reaches(dma_addr_t addr, int page, u32 flags)
{
	struct fake_mapping m;

	return fake_translate(addr, &m) && m.flags == flags &&
	       m.phys + (addr - m.first) == page_to_phys(pages[page]);
}

static bool reaches_nothing(dma_addr_t addr)
{
	struct fake_mapping m;

	return !fake_translate(addr, &m);
}

static int run_basic(void)
{
	unsigned int before = fake_mapped();
	dma_addr_t a = map(0, DMA_TO_DEVICE), b = map(0, DMA_FROM_DEVICE);
	dma_addr_t c = map(1, DMA_BIDIRECTIONAL);

	REQUIRE(a != DMA_MAPPING_ERROR && b != DMA_MAPPING_ERROR && c != DMA_MAPPING_ERROR);
	REQUIRE(a != b && reaches(a, 0, 1) && reaches(b, 0, 2) && reaches(c, 1, 3));
	unmap(a, DMA_TO_DEVICE);
	unmap(b, DMA_FROM_DEVICE);
	unmap(c, DMA_BIDIRECTIONAL);
	REQUIRE(fake_mapped() == before && reaches_nothing(a) && reaches_nothing(c));
	return 0;
}

/* Random maps and unmaps; every live mapping must lead to its page. */
static int run_random(void)
{
	static const enum dma_data_direction dirs[] = {
		DMA_BIDIRECTIONAL, DMA_TO_DEVICE, DMA_FROM_DEVICE
	};
	static const u32 flags[] = { 3, 1, 2 };
	static dma_addr_t live[256];
	static u8 page_of[256], dir_of[256];
	unsigned int i, n, used = 0;

	for (n = 0; n < 20000; n++) {
		i = get_random_u32() % ARRAY_SIZE(live);
		if (live[i]) {
			REQUIRE(reaches(live[i], page_of[i], flags[dir_of[i]]));
			unmap(live[i], dirs[dir_of[i]]);
			live[i] = 0;
			used--;
		} else {
			page_of[i] = get_random_u32() % PAGES;
			dir_of[i] = get_random_u32() % 3;
			live[i] = map(page_of[i], dirs[dir_of[i]]);
			REQUIRE(live[i] != DMA_MAPPING_ERROR);
			REQUIRE(reaches(live[i], page_of[i], flags[dir_of[i]]));
			used++;
		}
		if (!(n % 1000))
			cond_resched();
	}
	for (i = 0; i < ARRAY_SIZE(live); i++)
		if (live[i]) {
			unmap(live[i], dirs[dir_of[i]]);
			live[i] = 0;
		}
	return 0;
}

/* Live sharing: one mapping for two uses, none across directions. */
static int run_share(void)
{
	u64 maps = fake_maps();
	dma_addr_t a = map(2, DMA_TO_DEVICE), b = map(2, DMA_TO_DEVICE);
	dma_addr_t c = map(2, DMA_FROM_DEVICE);

	REQUIRE(a == b && c != a && fake_maps() == maps + 2);
	unmap(a, DMA_TO_DEVICE);
	REQUIRE(reaches(b, 2, 1));
	unmap(b, DMA_TO_DEVICE);
	unmap(c, DMA_FROM_DEVICE);
	return 0;
}

/*
 * A smaller mask holds for cached mappings too. The allocator's caches may have a few low
 * addresses from the last run, so the pages are many and some of them must be mapped above 4 GiB.
 */
static int run_mask(void)
{
	unsigned int i, n, above = 0, picked[4];
	dma_addr_t high[PAGES], low[4];
	bool right = true;

	for (i = 0; i < PAGES; i++) {
		high[i] = map(i, DMA_TO_DEVICE);
		if (high[i] == DMA_MAPPING_ERROR || !(high[i] >> 32))
			continue;
		if (above < ARRAY_SIZE(picked))
			picked[above] = i;
		above++;
	}
	for (i = 0; i < PAGES; i++)
		unmap(high[i], DMA_TO_DEVICE);
	REQUIRE(above >= PAGES / 2);
	REQUIRE(!dma_set_mask(dev, DMA_BIT_MASK(32)));
	for (n = 0; n < ARRAY_SIZE(low); n++) {
		low[n] = map(picked[n], DMA_TO_DEVICE);
		right = right && !(low[n] >> 32) && reaches(low[n], picked[n], 1);
	}
	for (n = 0; n < ARRAY_SIZE(low); n++)
		unmap(low[n], DMA_TO_DEVICE);
	REQUIRE(!dma_set_mask(dev, DMA_BIT_MASK(64)));
	REQUIRE(right);
	return 0;
}

static int run_resource(void)
{
	phys_addr_t bar = pci_resource_start(to_pci_dev(dev), 0);
	dma_addr_t a = dma_map_resource(dev, bar, PAGE_SIZE, DMA_BIDIRECTIONAL, 0);
	struct fake_mapping m;

	REQUIRE(!dma_mapping_error(dev, a));
	REQUIRE(fake_translate(a, &m) && m.phys == bar && m.flags == 7);
	dma_unmap_resource(dev, a, PAGE_SIZE, DMA_BIDIRECTIONAL, 0);
	REQUIRE(reaches_nothing(a));
	return 0;
}

static int run_coherent(void)
{
	struct fake_mapping m;
	dma_addr_t a;
	void *p = dma_alloc_coherent(dev, 5 * PAGE_SIZE, &a, GFP_KERNEL);

	REQUIRE(p && fake_translate(a + 5 * PAGE_SIZE - 1, &m) && m.phys == virt_to_phys(p));
	REQUIRE(m.last == a + 5 * PAGE_SIZE - 1 && m.flags == 3);
	dma_free_coherent(dev, 5 * PAGE_SIZE, p, a);
	REQUIRE(reaches_nothing(a));
	return 0;
}

static int map_list(struct scatterlist *sgl)
{
	int i;

	sg_init_table(sgl, PAGES);
	for (i = 0; i < PAGES; i++)
		sg_set_page(&sgl[i], pages[i], PAGE_SIZE - 64, 32);
	return dma_map_sg(dev, sgl, PAGES, DMA_FROM_DEVICE);
}

static struct scatterlist list[PAGES];

static int run_list(void)
{
	unsigned int before = fake_mapped();
	struct scatterlist *sg;
	int i;

	REQUIRE(map_list(list) == PAGES);
	for_each_sg(list, sg, PAGES, i)
		REQUIRE(reaches(sg_dma_address(sg) - 32, i, 2) && sg_dma_len(sg) == PAGE_SIZE - 64);
	dma_unmap_sg(dev, list, PAGES, DMA_FROM_DEVICE);
	REQUIRE(fake_mapped() == before);
	return 0;
}

/* The 33rd MAP of a list fails: the others are undone. */
static int run_list_fails(void)
{
	unsigned int before = fake_mapped();

	fake_set_mode(FAKE_MAP_FAILS, 32);
	REQUIRE(!map_list(list));
	fake_set_mode(FAKE_OK, 0);
	REQUIRE(fake_mapped() == before);
	return run_list();
}

/* A timer, which runs even if the only CPU polls. */
static void release_reverse(struct timer_list *timer)
{
	fake_release(true);
}

static DEFINE_TIMER(release_timer, release_reverse);

static void hold_then_reverse(void)
{
	fake_set_mode(FAKE_HOLD, 0);
	mod_timer(&release_timer, jiffies + msecs_to_jiffies(12));
}

/* Answers that come late and in reverse order, but within the bound. More than the slots. */
static int run_reverse(void)
{
	dma_addr_t a;

	hold_then_reverse();
	a = map(4, DMA_TO_DEVICE);
	REQUIRE(a != DMA_MAPPING_ERROR && reaches(a, 4, 1));
	unmap(a, DMA_TO_DEVICE);
	hold_then_reverse();
	return run_list();
}

static int run_map_fails(void)
{
	unsigned int before = fake_mapped();

	fake_set_mode(FAKE_MAP_FAILS, 0);
	REQUIRE(map(5, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	fake_set_mode(FAKE_OK, 0);
	REQUIRE(fake_mapped() == before);
	return run_basic();
}

/* 5.13.6: a used length of zero is a failure. This device did map: the driver must make sure. */
static int run_unwritten(void)
{
	fake_set_mode(FAKE_UNWRITTEN, 0);
	REQUIRE(map(6, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	fake_set_mode(FAKE_OK, 0);
	return 0;
}

/* UNMAPs fail until "answer": the addresses must not be given out again. */
static int run_unmap_lost(void)
{
	dma_addr_t a = map(7, DMA_TO_DEVICE);

	REQUIRE(a != DMA_MAPPING_ERROR);
	fake_set_mode(FAKE_UNMAP_FAILS, 0);
	unmap(a, DMA_TO_DEVICE);
	REQUIRE(reaches(a, 7, 1));
	kept = a;
	return 0;
}

static int run_unmap_fails(void)
{
	dma_addr_t more[16];
	int i, ret = run_unmap_lost();

	for (i = 0; i < ARRAY_SIZE(more); i++)
		more[i] = map(8, DMA_TO_DEVICE);
	fake_set_mode(FAKE_OK, 0);
	for (i = 0; i < ARRAY_SIZE(more); i++) {
		REQUIRE(more[i] != DMA_MAPPING_ERROR && more[i] != kept);
		unmap(more[i], DMA_TO_DEVICE);
	}
	return ret;
}

/* A MAP that is not answered fails within the bound; answered later, it is removed again. */
static int run_hold_map(void)
{
	fake_set_mode(FAKE_HOLD, 0);
	REQUIRE(map(9, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	REQUIRE(map(9, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	return 0;
}

static int run_keep(void)
{
	kept = map(10, DMA_TO_DEVICE);
	REQUIRE(kept != DMA_MAPPING_ERROR);
	return 0;
}

/* An UNMAP that is not answered returns; its addresses stay out of use. */
static int run_hold_unmap(void)
{
	fake_set_mode(FAKE_HOLD, 0);
	unmap(kept, DMA_TO_DEVICE);
	REQUIRE(map(11, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	return 0;
}

static int run_answer(void)
{
	fake_release(false);
	return 0;
}

static int run_empty(void)
{
	REQUIRE(!fake_mapped());
	return 0;
}

static int run_bad_id(void)
{
	int i;

	fake_set_mode(FAKE_BAD_ID, 0);
	for (i = 0; i < 1000; i++)
		REQUIRE(map(12, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	return 0;
}

static int run_refused(void)
{
	REQUIRE(map(13, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	return 0;
}

static int run_no_violation(void)
{
	REQUIRE(!fake_violations());
	return 0;
}

static const struct {
	const char *name;
	int (*fn)(void);
} scenarios[] = {
	{ "basic", run_basic }, { "random", run_random }, { "share", run_share },
	{ "mask", run_mask }, { "resource", run_resource }, { "coherent", run_coherent },
	{ "list", run_list }, { "list-fails", run_list_fails }, { "reverse", run_reverse },
	{ "map-fails", run_map_fails }, { "unwritten", run_unwritten },
	{ "unmap-fails", run_unmap_fails }, { "unmap-lost", run_unmap_lost },
	 { "hold-map", run_hold_map }, { "keep", run_keep },
	{ "hold-unmap", run_hold_unmap }, { "answer", run_answer }, { "empty", run_empty },
	{ "bad-id", run_bad_id }, { "refused", run_refused }, { "no-violation", run_no_violation },
};

static int run_set(const char *val, const struct kernel_param *kp)
{
	unsigned int i;

	if (!dev)
		return -ENODEV;
	for (i = 0; i < ARRAY_SIZE(scenarios); i++)
		if (sysfs_streq(val, scenarios[i].name))
			return scenarios[i].fn();
	return -EINVAL;
}

static const struct kernel_param_ops run_ops = { .set = run_set };
module_param_cb(run, &run_ops, NULL, 0200);

static int client_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));

	if (!ret && !dev)
		dev = &pdev->dev;
	return ret;
}

static void client_remove(struct pci_dev *pdev)
{
	if (dev == &pdev->dev)
		dev = NULL;
}

static const struct pci_device_id client_ids[] = {
	{ PCI_DEVICE(0x1234, 0x11e8) },
	{ 0 },
};

static struct pci_driver client_driver = {
	.name = "exi-fake",
	.id_table = client_ids,
	.probe = client_probe,
	.remove = client_remove,
};

/* 1: the driver is there and binds, 0: it is gone. */
static bool client;

static int client_set(const char *val, const struct kernel_param *kp)
{
	bool was = client;
	int ret = param_set_bool(val, kp);

	if (ret || was == client)
		return ret;
	if (!client) {
		pci_unregister_driver(&client_driver);
		return 0;
	}
	ret = pci_register_driver(&client_driver);
	client = !ret;
	return ret;
}

static const struct kernel_param_ops client_ops = { .set = client_set, .get = param_get_bool };
module_param_cb(client, &client_ops, &client, 0644);

int fake_client_init(void)
{
	int i;

	for (i = 0; i < PAGES; i++) {
		pages[i] = alloc_page(GFP_KERNEL);
		if (!pages[i])
			return -ENOMEM;
	}
	return 0;
}

void fake_client_exit(void)
{
	int i;

	if (client)
		pci_unregister_driver(&client_driver);
	for (i = 0; i < PAGES; i++)
		__free_page(pages[i]);
}
