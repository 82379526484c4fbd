package kubeapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	etcdserverpb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	apixv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"drover.io/drover/api"
)

// formerGroup is the API group that Drover's objects had before api.GroupVersion.
const formerGroup = "drover.io"

const (
	formerObjects     = "/registry/" + formerGroup + "/"
	definitionObjects = "/registry/apiextensions.k8s.io/customresourcedefinitions/"
)

// formerCopy is the copy of the database before the first move. The rotation of hourly snapshots does not remove the
// file.
const formerCopy = "before-storage.drover.io.db"

// moveGroup moves the objects of the former group to the group of today and keeps UIDs, times, finalizers and
// statuses. The server calls moveGroup before anything serves objects. Each transaction moves one object, so that a
// kill leaves every object in exactly one group, and the next start moves the rest. The former definitions are
// deleted last.
func (s *store) moveGroup(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("move objects from group %s to %s: %w", formerGroup, api.GroupVersion.Group, err)
		}
	}()
	some, err := s.listPage(ctx, formerObjects, "", 1)
	if err != nil {
		return err
	}
	if len(some) > 0 {
		s.checkQuota(ctx) // a full database refuses writes
		if err := s.copyBeforeMove(); err != nil {
			return err
		}
	}
	moved, after := 0, ""
	for {
		kv, done, err := s.moveNext(ctx, after)
		if err != nil {
			return err
		}
		if kv == "" {
			break
		}
		if after = kv; done {
			moved++
		} else {
			s.log.Warn("an object stays in the former group, because the group of today has another one of its name",
				"key", kv)
		}
	}
	if moved > 0 {
		s.log.Info("objects were moved to another API group", "objects", moved, "from", formerGroup,
			"to", api.GroupVersion.Group, "former state", filepath.Join(s.snaps, formerCopy))
	}
	return s.deleteFormerDefinitions(ctx)
}

// listPage returns up to limit entries whose keys have a prefix and come after another key.
func (s *store) listPage(ctx context.Context, prefix, after string, limit int64) ([]*mvccpb.KeyValue, error) {
	from := prefix
	if after != "" {
		from = after + "\x00"
	}
	end := []byte(prefix)
	end[len(end)-1]++ // the first key after all keys with the prefix
	got, err := s.etcd.Server.Range(ctx, &etcdserverpb.RangeRequest{Key: []byte(from), RangeEnd: end, Limit: limit})
	if err != nil {
		return nil, err
	}
	return got.Kvs, nil
}

// moveNext moves the first object after a key and returns the object's former key, or "" after the last object. If
// the new key exists already, both keys stay and moveNext reports false.
func (s *store) moveNext(ctx context.Context, after string) (key string, moved bool, err error) {
	list, err := s.listPage(ctx, formerObjects, after, 1)
	if err != nil || len(list) == 0 {
		return "", false, err
	}
	kv := list[0]
	key = string(kv.Key)
	value, err := toGroupOfToday(kv.Value)
	if err != nil {
		return "", false, api.Errorf(api.Corrupt, "%s: %w", key, err)
	}
	to := []byte("/registry/" + api.GroupVersion.Group + "/" + strings.TrimPrefix(key, formerObjects))
	done, err := s.etcd.Server.Txn(ctx, &etcdserverpb.TxnRequest{
		Compare: []*etcdserverpb.Compare{{Key: to, Target: etcdserverpb.Compare_CREATE,
			TargetUnion: &etcdserverpb.Compare_CreateRevision{CreateRevision: 0}}},
		Success: []*etcdserverpb.RequestOp{
			{Request: &etcdserverpb.RequestOp_RequestPut{RequestPut: &etcdserverpb.PutRequest{Key: to, Value: value}}},
			{Request: &etcdserverpb.RequestOp_RequestDeleteRange{
				RequestDeleteRange: &etcdserverpb.DeleteRangeRequest{Key: kv.Key}}},
		}})
	if err != nil {
		return "", false, fmt.Errorf("%s: %w", key, err)
	}
	return key, done.Succeeded, nil
}

// toGroupOfToday changes the group in the versions of an object, of the owners and of the managed fields.
func toGroupOfToday(value []byte) ([]byte, error) {
	var object map[string]any
	d := json.NewDecoder(bytes.NewReader(value))
	d.UseNumber() // keep the written form of numbers
	if err := d.Decode(&object); err != nil {
		return nil, err
	}
	rename := func(of map[string]any) {
		if version, ok := of["apiVersion"].(string); ok && strings.HasPrefix(version, formerGroup+"/") {
			of["apiVersion"] = api.GroupVersion.Group + strings.TrimPrefix(version, formerGroup)
		}
	}
	rename(object)
	meta, _ := object["metadata"].(map[string]any)
	for _, field := range []string{"ownerReferences", "managedFields"} {
		list, _ := meta[field].([]any)
		for _, entry := range list {
			if of, ok := entry.(map[string]any); ok {
				rename(of)
			}
		}
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	err := e.Encode(object)
	return out.Bytes(), err
}

// copyBeforeMove keeps the state for the former version of the program. An existing copy is older than a killed move,
// and therefore complete.
func (s *store) copyBeforeMove() error {
	path := filepath.Join(s.snaps, formerCopy)
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = s.saveCopy(path)
	}
	if err != nil {
		return api.Errorf(api.Unavailable, "copy of the state in %s: %w", path, err)
	}
	return nil
}

func (s *store) deleteFormerDefinitions(ctx context.Context) error {
	for after := ""; ; {
		list, err := s.listPage(ctx, definitionObjects, after, 100)
		if err != nil || len(list) == 0 {
			return err
		}
		for _, kv := range list {
			after = string(kv.Key)
			if _, group, _ := strings.Cut(strings.TrimPrefix(after, definitionObjects), "."); group != formerGroup {
				continue
			}
			if _, err := s.etcd.Server.DeleteRange(ctx, &etcdserverpb.DeleteRangeRequest{Key: kv.Key}); err != nil {
				return fmt.Errorf("%s: %w", after, err)
			}
		}
	}
}

// refuseFormerObjects fails if a Kubernetes cluster has objects of the former group. Drover cannot move objects in the
// database of the cluster, and a controller that overlooks objects would create duplicates.
func refuseFormerObjects(ctx context.Context, cfg *rest.Config, today []apixv1.CustomResourceDefinition) error {
	objects, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("objects of group %s: %w", formerGroup, err)
	}
	for i := range today {
		former := schema.GroupVersionResource{Group: formerGroup, Version: api.GroupVersion.Version,
			Resource: today[i].Spec.Names.Plural}
		list, err := objects.Resource(former).List(ctx, metav1.ListOptions{Limit: 1})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("objects of group %s: %w", formerGroup, err)
		}
		if len(list.Items) > 0 {
			return api.Errorf(api.InUse, "%s.%s %s: its API group is now %s, and this version does not see it; go back to "+
				"the former version, and see \"Upgrade\" in docs/operations.md", former.Resource, formerGroup,
				list.Items[0].GetName(), api.GroupVersion.Group)
		}
	}
	return nil
}
