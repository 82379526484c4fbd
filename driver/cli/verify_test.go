package cli_test

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// twoCopies creates an image with ready copies on two disks of a node.
func twoCopies(t *testing.T, name string) (img *api.BackingImage, copies [2]*api.ImageCopy) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	img = &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceDownload,
		SourceParameters: map[string]string{"url": "http://h.example/x"}}}
	img.Name = name
	must(store.Create(t.Context(), img))
	t.Cleanup(func() { _ = store.Delete(context.Background(), img) })
	node := &api.Node{}
	node.Name = "node-of-" + name
	must(store.Create(t.Context(), node))
	t.Cleanup(func() { _ = store.Delete(context.Background(), node) })
	img.Status.UUID, img.Status.State, img.Status.ReadyCopies = api.NewUID(), api.ImageReady, 2
	for i, path := range []string{"/srv/one", "/srv/two"} {
		c := &api.ImageCopy{Spec: api.ImageCopySpec{Image: name, UUID: img.Status.UUID, Layers: []api.UID{api.NewUID()},
			Node: node.Name, Disk: api.NewUID()}}
		c.Name = name + "." + path[len("/srv/"):]
		c.Labels = map[string]string{api.LabelImage: name}
		must(store.Create(t.Context(), c))
		t.Cleanup(func() { _ = store.Delete(context.Background(), c) })
		c.Status.State = api.ImageReady
		must(store.Status().Update(t.Context(), c))
		copies[i] = c
		img.Status.Copies = append(img.Status.Copies, api.ImageCopySummary{Disk: c.Spec.Disk, Node: node.Name,
			State: api.ImageReady})
		node.Status.Disks = append(node.Status.Disks, api.DiskStatus{Path: path, UID: c.Spec.Disk, Ready: true})
	}
	must(store.Status().Update(t.Context(), node))
	must(store.Status().Update(t.Context(), img))
	return img, copies
}

// TestImageVerifyOfRemovedCopies: image verify does not wait for a copy removed meanwhile. Without any copy left, image
// verify fails.
func TestImageVerifyOfRemovedCopies(t *testing.T) {
	for name, c := range map[string]struct {
		gone  int
		code  int
		words string
	}{
		"one-goes":  {1, 0, `image "one-goes" verified: 1 copy matches its digests`},
		"both-gone": {2, 3, `image "both-gone": its copies were removed before they were verified`},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			_, copies := twoCopies(t, name)
			remarks, done := make(heard, 1000), make(chan result, 1)
			go func() { done <- droverTo(ctx, remarks, kubeconfig("image", "verify", name)...) }()
			remarks.await(t, ctx, "0 of 2 copies")
			for _, f := range copies[2-c.gone:] {
				if err := store.Delete(ctx, f); err != nil {
					t.Fatal(err)
				}
			}
			if c.gone == 1 {
				img := &api.BackingImage{}
				if err := store.Get(ctx, client.ObjectKey{Name: name}, img); err != nil {
					t.Fatal(err)
				}
				copies[0].Status.Verified = img.Annotations[api.AnnotationVerify]
				if err := store.Status().Update(ctx, copies[0]); err != nil {
					t.Fatal(err)
				}
			}
			r := <-done
			for len(remarks) > 0 {
				r.err += <-remarks
			}
			r.mustSay(t, c.code, c.words)
		})
	}
}

// TestImageVerifyWaits: image verify waits for every copy, and prints each damage with the disk and the next step.
func TestImageVerifyWaits(t *testing.T) {
	const found = "the 2 MiB at 4194304 do not match their digest"
	for name, c := range map[string]struct {
		second func(st *api.ImageCopyStatus)
		code   int
		words  []string
	}{
		"verified": {func(*api.ImageCopyStatus) {}, 0, []string{`image "verified" verified: 2 copies match their digests`}},
		"repaired": {func(st *api.ImageCopyStatus) {
			st.State, st.Message, st.NextTry = api.ImageFailed, found, metav1.NewTime(time.Now().Add(5*time.Second))
		}, 1, []string{`image "repaired": 1 of 2 copies`, "disk /srv/two of node node-of-repaired: " + found, "lost copies",
			"drover image show repaired"}},
		"for-good": {func(st *api.ImageCopyStatus) {
			st.State, st.Message = api.ImageFailed, found+"; an upload cannot be asked for again"
		}, 1, []string{`image "for-good": 1 of 2 copies`, "disk /srv/two of node", found, "cannot be asked for again"}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			_, copies := twoCopies(t, name)
			remarks, done := make(heard, 1000), make(chan result, 1)
			go func() { done <- droverTo(ctx, remarks, kubeconfig("image", "verify", name)...) }()
			img, err := await.Until(ctx, store, name, func(i *api.BackingImage) (bool, error) {
				return i.Annotations[api.AnnotationVerify] != "", nil
			})
			if err != nil {
				t.Fatal(err)
			}
			verified := func(i int, change func(*api.ImageCopyStatus)) {
				t.Helper()
				copies[i].Status.Verified = img.Annotations[api.AnnotationVerify]
				change(&copies[i].Status)
				if err := store.Status().Update(ctx, copies[i]); err != nil {
					t.Fatal(err)
				}
			}
			remarks.await(t, ctx, "0 of 2 copies")
			verified(0, func(*api.ImageCopyStatus) {})
			remarks.await(t, ctx, "1 of 2 copies")
			select {
			case r := <-done:
				t.Fatalf("it did not wait for the second copy: %+v", r)
			default:
			}
			verified(1, c.second)
			r := <-done
			for len(remarks) > 0 {
				r.err += <-remarks
			}
			r.mustSay(t, c.code, c.words...)
		})
	}
}

// TestImageVerifyOfALostCopy: image verify reports a copy as lost if the copy is lost and imported again meanwhile.
func TestImageVerifyOfALostCopy(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	_, copies := twoCopies(t, "one-lost")
	remarks, done := make(heard, 1000), make(chan result, 1)
	go func() { done <- droverTo(ctx, remarks, kubeconfig("image", "verify", "one-lost")...) }()
	remarks.await(t, ctx, "0 of 2 copies")
	img := &api.BackingImage{}
	if err := store.Get(ctx, client.ObjectKey{Name: "one-lost"}, img); err != nil {
		t.Fatal(err)
	}
	becomes := func(i int, state api.ImageState, verified string) {
		t.Helper()
		copies[i].Status.State, copies[i].Status.Verified = state, verified
		if err := store.Status().Update(ctx, copies[i]); err != nil {
			t.Fatal(err)
		}
	}
	token := img.Annotations[api.AnnotationVerify]
	becomes(1, api.ImagePending, "")
	becomes(1, api.ImageInProgress, "")
	becomes(1, api.ImageReady, token)
	becomes(0, api.ImageReady, token)
	r := <-done
	for len(remarks) > 0 {
		r.err += <-remarks
	}
	r.mustSay(t, 1, `image "one-lost": 1 of 2 copies`, "disk /srv/two of node node-of-one-lost: the copy was lost",
		"lost copies")
}

// TestImageCleanupCountsWhatIsThere: image cleanup counts the existing copies, because the list in the image's status
// follows later.
func TestImageCleanupCountsWhatIsThere(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	_, copies := twoCopies(t, "cleaned-one")
	done := make(chan result, 1)
	go func() { done <- droverIn(ctx, kubeconfig("image", "cleanup", "cleaned-one")...) }()
	img, err := await.Until(ctx, store, "cleaned-one", func(i *api.BackingImage) (bool, error) {
		return len(i.Spec.CleanupDisks) == 2, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Delete(ctx, copies[1]); err != nil {
		t.Fatal(err)
	}
	img.Spec.CleanupDisks = nil
	if err := store.Update(ctx, img); err != nil {
		t.Fatal(err)
	}
	r := <-done
	r.mustSay(t, 0, `image "cleaned-one" cleaned: 1 of 2 copies stay`)
}

// TestImageVerifyOfDamaged: without a readable copy, image verify prints the damage of each copy, and not the lack of
// copies.
func TestImageVerifyOfDamaged(t *testing.T) {
	const found = "the 2 MiB at 4194304 do not match their digest"
	img, copies := twoCopies(t, "damaged")
	for i, c := range copies {
		c.Status.State, c.Status.Message, c.Status.NextTry = api.ImageFailed, found, metav1.NewTime(time.Now().Add(time.Hour))
		if err := store.Status().Update(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		img.Status.Copies[i].State = api.ImageFailed
	}
	img.Status.ReadyCopies = 0
	if err := store.Status().Update(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("image", "verify", "damaged")...).mustSay(t, 1, `image "damaged": 2 of 2 copies are not well`,
		"disk /srv/one of node node-of-damaged", found, "lost copies")
}
