// SPDX-License-Identifier: GPL-2.0
/*
 * Runs the cases, one after the other, while the module is loaded; see README.md for the lines
 * that it prints. Loading succeeds if all have run, whatever came out of them.
 */
#include <linux/moduleparam.h>
#include <linux/module.h>
#include <uapi/linux/virtio_ids.h>

#include "iommu-cases.h"

/* Of the lines in the kernel's log. */
#define PREFIX		"iommu-cases: "
#define VENDOR		0x1af4
#define MODERN(id)	(0x1040 + (id))
/* Transitional entropy devices have one of their own. */
#define LEGACY_RNG	0x1005

static unsigned int from;
module_param(from, uint, 0444);
MODULE_PARM_DESC(from, "number of the first case to run, from 0");

static struct iommu iommu;
static struct accessor accessor;

static struct pci_dev *find(unsigned int device)
{
	return pci_get_device(VENDOR, device, NULL);
}

static u32 endpoint_of(struct pci_dev *pdev)
{
	return pci_dev_id(pdev);
}

/* The first region that the endpoint must not map. */
static void find_reserved(struct run *run)
{
	u32 size = iommu.probe_size, at = 0;

	probe(run, run->endpoint);
	while (!iommu.has_resv && at + sizeof(struct virtio_iommu_probe_resv_mem) <= size) {
		const struct virtio_iommu_probe_resv_mem *property = (void *)iommu.in + at;
		u16 type = le16_to_cpu(property->head.type) & VIRTIO_IOMMU_PROBE_T_MASK;

		if (!type)
			break;
		if (type == VIRTIO_IOMMU_PROBE_T_RESV_MEM) {
			iommu.has_resv = true;
			iommu.resv_first = le64_to_cpu(property->start);
			iommu.resv_last = le64_to_cpu(property->end);
		}
		at += sizeof(property->head) + le16_to_cpu(property->head.length);
	}
}

static const struct iommu_case *case_number(unsigned int number)
{
	if (number < request_case_count)
		return &request_cases[number];
	number -= request_case_count;
	if (number < mapping_case_count)
		return &mapping_cases[number];
	number -= mapping_case_count;
	if (number < access_case_count)
		return &access_cases[number];
	return number == access_case_count ? &last_case : NULL;
}

static int run_case(struct run *run, unsigned int number, const struct iommu_case *it)
{
	int ret;

	/* If the device never comes back from it, this line says from what. */
	pr_notice(PREFIX "begin %u %s\n", number, it->name);
	run->domain = 1 + number * DOMAINS;
	run->is_over = false;
	run->len = 0;
	run->line[0] = 0;
	iommu.event_len = it->event_len ?: sizeof(struct virtio_iommu_fault);
	ret = iommu_start(&iommu, it->without);
	if (ret)
		return ret;
	it->run(run);
	pr_notice(PREFIX "end %u %s%s\n", number, it->name, run->line);
	/* Back to a device that lets nothing through, has no domain and takes requests. */
	ret = iommu_start(&iommu, 0);
	if (ret)
		return ret;
	iommu_set_bypass(&iommu, 0);
	run->is_over = false;
	iommu_forget(run);
	return 0;
}

static int run_all(struct run *run)
{
	const struct iommu_case *it;
	unsigned int number, count = 0;
	int ret;

	iommu.event_len = sizeof(struct virtio_iommu_fault);
	ret = iommu_start(&iommu, 0);
	if (ret)
		return ret;
	iommu_set_bypass(&iommu, 0);
	find_reserved(run);
	pr_notice(PREFIX "endpoint %u%s, input to %#llx, domains to %#x, reserved %#llx to %#llx\n",
		  run->endpoint, run->line, iommu.input_last, iommu.domain_last,
		  iommu.resv_first, iommu.resv_last);
	for (number = from; (it = case_number(number)); number++, count++) {
		ret = run_case(run, number, it);
		if (ret) {
			pr_err(PREFIX "case %s: the device does not start: %d\n", it->name, ret);
			return ret;
		}
	}
	pr_notice(PREFIX "done, %u cases\n", count);
	return 0;
}

static int __init cases_init(void)
{
	struct pci_dev *unit = find(MODERN(VIRTIO_ID_IOMMU));
	struct pci_dev *rng = find(MODERN(VIRTIO_ID_RNG)) ?: find(LEGACY_RNG);
	struct pci_dev *other = find(MODERN(VIRTIO_ID_NET));
	struct run *run = kzalloc(sizeof(*run), GFP_KERNEL);
	int ret = -ENODEV;

	if (!run) {
		ret = -ENOMEM;
		goto out;
	}
	if (!unit || !rng || !other) {
		pr_err(PREFIX "virtio-iommu, virtio-rng and virtio-net are needed, on PCI\n");
		goto out;
	}
	*run = (struct run) {
		.iommu = &iommu,
		.accessor = &accessor,
		.endpoint = endpoint_of(rng),
		.other = endpoint_of(other),
	};
	ret = iommu_open(&iommu, unit);
	if (ret)
		goto out;
	ret = accessor_open(&accessor, rng);
	if (ret)
		goto close;
	ret = run_all(run);
	/* Linux's drivers come next, and know of no IOMMU. */
	iommu_set_bypass(&iommu, 1);
	if (function_reset(&iommu.fn))
		pr_err(PREFIX "the device does not end its reset\n");
	accessor_close(&accessor);
close:
	iommu_close(&iommu);
out:
	kfree(run);
	pci_dev_put(other);
	pci_dev_put(rng);
	pci_dev_put(unit);
	return ret;
}

static void __exit cases_exit(void)
{
}

module_init(cases_init);
module_exit(cases_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Requests to a virtio-iommu device that break the rules, and accesses behind it");
