package stack

import (
	"crypto/sha256"
	"math/rand/v2"
	"sync"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// TestAdoptedChunksSurvivePowerLoss: after a power loss at any moment, a writer adopts the chunks that were synced, and
// none whose bytes the disk lacks. With the other chunks written again, the layer is the same as without the loss.
func TestAdoptedChunksSurvivePowerLoss(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for seed := range uint64(5) {
		rng := rand.New(rand.NewPCG(seed, 11))
		const count = 8
		const size = count*chunkSize - 3*blockSize
		var all [count][]byte
		for c := range all {
			all[c] = block.AlignedBuffer(int(min(chunkSize, size-int64(c)*chunkSize)))
			randomBytes(rng, all[c])
			clear(all[c][blockSize : 5*blockSize])
		}
		create := func(d *Disk, uid string) *layer.Writer {
			w, err := d.Create(ctx, uid, size)
			if err != nil {
				t.Fatal(err)
			}
			w.(block.Exact).Exact("")
			return w.(*layer.Writer)
		}
		write := func(w *layer.Writer, c int) {
			if err := w.WriteChunk(all[c], int64(c)*chunkSize, sha256.Sum256(all[c])); err != nil {
				t.Fatal(err)
			}
		}
		seal := func(w *layer.Writer) string {
			root, _, err := w.Seal(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return root
		}
		whole := create(newDisk(t), string(api.NewUID()))
		for c := range all {
			write(whole, c)
		}
		want := seal(whole)

		p := freshPower(t, nil)
		uid := string(api.NewUID())
		w := create(p.disk(t), uid)
		if err := w.Checkpoint(size/chunkSize*chunkSize, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		order := rng.Perm(count)
		synced := rng.IntN(count)
		for i, c := range order[:count-1] {
			if i == synced {
				if err := w.Sync(ctx); err != nil {
					t.Fatal(err)
				}
			}
			write(w, c)
		}
		_ = w.Leave() // a killed process releases the lock, too

		d := p.crash(t, rng).disk(t)
		resumed, _, _, err := d.Resume(ctx, uid)
		if err != nil {
			t.Fatal(err)
		}
		w = resumed.(*layer.Writer)
		w.Exact("")
		var mu sync.Mutex
		has := map[int]bool{}
		err = w.AdoptChunks(ctx, func(c int64) ([32]byte, bool) { return sha256.Sum256(all[c]), true }, func(c int64) {
			mu.Lock()
			defer mu.Unlock()
			has[int(c)] = true
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range order[:min(synced, count-1)] {
			if !has[c] && c != count-1 { // the checkpoint ends before the short chunk
				t.Errorf("seed %d: chunk %d was synced, and is not adopted", seed, c)
			}
		}
		if has[order[count-1]] {
			t.Errorf("seed %d: chunk %d was never written, and is adopted", seed, order[count-1])
		}
		for c := range all {
			if !has[c] {
				write(w, c)
			}
		}
		if root := seal(w); root != want {
			t.Errorf("seed %d: root %s, want %s", seed, root, want)
		}
		if err := d.Verify(ctx, uid); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
	}
}
