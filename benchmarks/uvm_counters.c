/* Buffers of CUPTI's activity records, and the sums of the unified memory counters in them. Written in C because CUPTI
 * calls back from its own threads, while a launch may hold Python's lock and wait for them. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

enum { UNIFIED_MEMORY_COUNTER = 25, KINDS = 16, BUFFER = 8 << 20 };

/* The beginning of CUpti_ActivityUnifiedMemoryCounter3, the same in all versions since CUDA 7. */
struct record {
    uint32_t kind;
    uint32_t counter;
    uint64_t value;
};

static int (*next_record)(uint8_t *, size_t, struct record **);
static _Atomic uint64_t sums[KINDS], counts[KINDS];

void uvm_init(int (*next)(uint8_t *, size_t, struct record **)) { next_record = next; }

void uvm_requested(uint8_t **buffer, size_t *size, size_t *most) {
    *buffer = aligned_alloc(64, BUFFER);
    *size = *buffer ? BUFFER : 0;
    *most = 0;
}

void uvm_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    struct record *record = NULL;
    (void)context, (void)stream, (void)size;
    while (valid && next_record(buffer, valid, &record) == 0)
        if (record->kind == UNIFIED_MEMORY_COUNTER && record->counter < KINDS) {
            sums[record->counter] += record->value;
            counts[record->counter] += 1;
        }
    free(buffer);
}

uint64_t uvm_sum(uint32_t counter) { return sums[counter]; }
uint64_t uvm_count(uint32_t counter) { return counts[counter]; }
