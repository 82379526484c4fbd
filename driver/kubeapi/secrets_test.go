package kubeapi_test

import (
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"drover.io/drover/driver/kubeapi"
)

// TestSecrets: Secrets behave as in a cluster: written as text, read as bytes, listed by namespace, and kept over a
// restart.
func TestSecrets(t *testing.T) {
	dir := t.TempDir()
	s, stop := start(t, kubeapi.Options{Dir: dir})
	c, err := kubernetes.NewForConfig(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	get := func() (*corev1.Secret, error) {
		return c.CoreV1().Secrets("vms").Get(ctx, "mirror", metav1.GetOptions{})
	}
	if _, err := c.CoreV1().Secrets("vms").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "mirror"},
		Data: map[string][]byte{"password": []byte("old")}, StringData: map[string]string{"password": "s3cret", "username": "u"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := get()
	if err != nil || string(got.Data["password"]) != "s3cret" || string(got.Data["username"]) != "u" ||
		got.StringData != nil || got.Type != corev1.SecretTypeOpaque || got.UID == "" {
		t.Fatalf("%v, %+v", err, got)
	}
	if list, err := c.CoreV1().Secrets("default").List(ctx, metav1.ListOptions{}); err != nil || len(list.Items) != 0 {
		t.Errorf("another namespace has %v, %v", list, err)
	}
	yes := true
	got.Immutable, got.StringData = &yes, map[string]string{"username": "v"}
	if got, err = c.CoreV1().Secrets("vms").Update(ctx, got, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	got.StringData = map[string]string{"username": "w"}
	if _, err = c.CoreV1().Secrets("vms").Update(ctx, got, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("an immutable secret was changed: %v", err)
	}
	big := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "big"}, Data: map[string][]byte{"x": make([]byte, 1<<20+1)}}
	if _, err = c.CoreV1().Secrets("vms").Create(ctx, big, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("a secret of more than 1 MiB: %v", err)
	}
	stop()
	s, _ = start(t, kubeapi.Options{Dir: dir})
	if c, err = kubernetes.NewForConfig(s.Config); err != nil {
		t.Fatal(err)
	}
	if got, err = get(); err != nil || string(got.Data["username"]) != "v" {
		t.Fatalf("after a restart: %v, %+v", err, got)
	}
	if _, err := exec.LookPath("kubectl"); err != nil {
		return
	}
	kubectl(t, s, "create", "secret", "generic", "ca", "-n", "vms", "--from-literal=ca.crt=x")
	if out := kubectl(t, s, "get", "secrets", "-n", "vms"); !strings.Contains(out, "mirror") || !strings.Contains(out, "ca") {
		t.Error(out)
	}
	kubectl(t, s, "delete", "secret", "ca", "-n", "vms")
}
