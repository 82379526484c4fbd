package longhorn

import (
	"bytes"
	"slices"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/longhorntest"
)

// TestDamagedBlocksAloneAreLeftOut: a restore of the intact chunks writes all blocks but the lost one, and not those that
// the caller has.
func TestDamagedBlocksAloneAreLeftOut(t *testing.T) {
	for name, blockSize := range map[string]int64{"2 MiB": 2 * mib, "16 MiB": 16 * mib} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			size := 2*blockSize + 5*mib
			blocks := map[int64][]byte{0: content(1, int(blockSize)), blockSize: content(2, int(blockSize)),
				2 * blockSize: content(3, int(min(blockSize, 5*mib)))}
			longhorntest.AddBackup(t, s, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: size,
				BlockSize: blockSize, Method: "lz4", Blocks: blocks})
			lost := longhorntest.BlockName(longhorntest.VolumeFolder("pvc-1")+"blocks/", blocks[blockSize])
			must(t, s.Delete(t.Context(), lost))
			o, err := New(s, Options{Cache: t.TempDir()}).OpenBackup(t.Context(), Name{"pvc-1", "backup-1"}, nil)
			must(t, err)
			defer o.Close()
			chunks := blockSize / (2 * mib)
			var damaged []int64
			for c := chunks; c < 2*chunks; c++ {
				damaged = append(damaged, c)
			}
			want := make([]byte, size)
			copy(want[2*blockSize:], blocks[2*blockSize])
			sink := &memory{bytes: make([]byte, size)}
			got, err := o.RestoreIntact(t.Context(), sink, func(c int64) bool { return c < chunks })
			if err != nil || !slices.Equal(got, damaged) || !bytes.Equal(sink.bytes, want) || !sink.synced {
				t.Errorf("the damaged chunks are %v, %v, or other bytes were written", got, err)
			}
			copy(want, blocks[0])
			got, err = o.RestoreIntact(t.Context(), sink, func(c int64) bool { return c == 0 && blockSize > 2*mib })
			if err != nil || !slices.Equal(got, damaged) || !bytes.Equal(sink.bytes, want) {
				t.Errorf("a block with a missing chunk: %v, %v, or other bytes were written", got, err)
			}
			if err := o.Restore(t.Context(), sink); !api.Is(err, api.Corrupt) {
				t.Errorf("a restore of everything: %v", err)
			}
		})
	}
}

// TestVanishedStoreIsNotDamaged: without the description of the backup, the blocks are not lost, but the store is away.
func TestVanishedStoreIsNotDamaged(t *testing.T) {
	s := newStore(t)
	b := content(1, 2*mib)
	longhorntest.AddBackup(t, s, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: 12 * mib, BlockSize: 2 * mib,
		Method: "lz4", Blocks: map[int64][]byte{0: b}})
	o, err := New(s, Options{Cache: t.TempDir()}).OpenBackup(t.Context(), Name{"pvc-1", "backup-1"}, nil)
	must(t, err)
	defer o.Close()
	must(t, s.Delete(t.Context(), longhorntest.BlockName(longhorntest.VolumeFolder("pvc-1")+"blocks/", b)))
	must(t, s.Delete(t.Context(), longhorntest.CfgName("pvc-1", "backup-1")))
	sink := &memory{bytes: make([]byte, 12*mib)}
	if err := o.Restore(t.Context(), sink); !api.Is(err, api.Unavailable) {
		t.Errorf("a restore: %v", err)
	}
	if _, err := o.RestoreIntact(t.Context(), sink, nil); !api.Is(err, api.Unavailable) || sink.synced {
		t.Errorf("a restore of the intact chunks: %v", err)
	}
}
